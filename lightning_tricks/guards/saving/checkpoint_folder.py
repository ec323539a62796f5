"""The folder of a run's checkpoints: what is in it, what is deleted, a full disk, the leftovers of killed processes.

What is deleted is always a checkpoint of this run: its record names the run, and its name is one that SafeCheckpoint
gives. Checkpoints of other runs, those whose record names none because a version before 2 of the record wrote it, and
copies that the user made under other names are neither counted nor deleted nor replaced.

Needs no Trainer. One process of a run, rank 0, changes the folder.
"""

import errno
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks.checkpoints.check_checkpoint import replaced_path
from lightning_tricks.checkpoints.record import Record
from lightning_tricks.checkpoints.swap_in import remove, staging_path
from lightning_tricks.guards.saving.last_link import LAST, move_last, record_or_none
from lightning_tricks.guards.saving.retention import Records, Retention, best_first, last_of, to_delete, to_make_room

_PATTERN = "*.ckpt"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the process's limit


class CheckpointFolder:
    """The checkpoints of one folder; decides what follows when AtomicCheckpointIO has written one, or could not.

    Args:
        path: the folder, which need not exist yet.
        retention: how many checkpoints stay.
        run: identifier of the run.
        on_update: called with the run's records when there is a new checkpoint, in the thread that wrote it.
    """

    def __init__(
        self, path: Path, retention: Retention, run: str, on_update: Callable[[Records], None] = lambda _: None
    ) -> None:
        self.path, self.retention, self.run, self.on_update = path, retention, run, on_update
        self.held: set[str] = set()  # names of checkpoints that stay whatever their age
        self.written: dict[str, Record] = {}  # of this process: for a CheckpointIO that writes no records
        self.answered: Path | None = None  # the newest checkpoint that was written or given up
        self._retried: Path | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the lock, which cannot be copied."""
        state = dict(self.__dict__)
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def records(self) -> dict[str, Record]:
        """The records of all checkpoints that have one; those of other programs, and damaged ones, are left out."""
        found = {}
        for path in self.path.glob(_PATTERN):
            if path.name != LAST and (record := record_or_none(path) or self.written.get(path.name)):
                found[path.name] = record
        return found

    def of_this_run(self, records: Records) -> dict[str, Record]:
        """Those of the records that name this run, by the names that `path_of` gives: others are a user's copies."""
        return {
            name: record
            for name, record in records.items()
            if record.run == self.run and re.fullmatch(rf"step={record.step}(-not-finite)?(-v\d+)?\.ckpt", name)
        }

    def line_on_others(self) -> str | None:
        """The line that tells of checkpoints that this run did not write; None where there are none."""
        records = {name: record for name, record in self.records().items() if record.number > 0}
        others = records.keys() - self.of_this_run(records).keys()
        if not others:
            return None
        newest = max(others, key=lambda name: records[name].number)
        return (
            f"SafeCheckpoint: {self.path} holds checkpoints that this run did not write ({len(others)}, the newest is "
            f"{newest}): it neither counts nor deletes them, so delete by hand what you do not need"
        )

    def largest_number(self) -> int:
        """The number of the newest checkpoint, 0 where there is none."""
        return max((record.number for record in self.records().values()), default=0)

    def newest(self) -> Path | None:
        """The path of the checkpoint that `last` means."""
        name = last_of(self.records())
        return self.path / name if name else None

    def is_beaten_by(self, path: str, score: Any, best: Record) -> bool:
        """Whether a checkpoint in the folder of an earlier run, still there, has a better score than the best here."""
        if score is None or Path(path).parent == self.path or not Path(path).exists():
            return False
        return best_first({"": best, "elsewhere": Record(score=float(score))}, self.retention.mode, 1) != [""]

    def path_of(self, record: Record) -> Path:
        """The path for a new checkpoint, `step=N.ckpt`.

        Where a file of another run or program has that name, it is `step=N-v1.ckpt`; where the new weights are not
        finite and those of the older checkpoint are, `step=N-not-finite.ckpt`.
        """
        name, ours = f"step={record.step}", self.of_this_run(self.records())
        older = ours.get(f"{name}.ckpt")
        if record.finite is False and older and older.finite:
            name += "-not-finite"
        path, versions = self.path / f"{name}.ckpt", itertools.count(1)
        while path.name not in ours and os.path.lexists(path):
            path = self.path / f"{name}-v{next(versions)}.ckpt"
        return path

    def has(self, path: Path, record: Record) -> bool:
        """Whether the checkpoint of a record has its name, and not an older one that it replaces in the background."""
        found = record_or_none(path)
        return path.exists() and (found is None or found.number == record.number)

    def hold(self, path: Path) -> None:
        """Keep a checkpoint, or the one of which it is a link or a copy, whatever its age."""
        record = record_or_none(path)
        self.held = {name for name, other in self.records().items() if other == record}

    def update(self) -> Records:
        """Move `last.ckpt` to the newest finite checkpoint, then delete what need not stay; returns this run's records.

        Idempotent. Called when a new checkpoint has its name, so that nothing is deleted before.
        """
        with self._lock:
            records = self.records()
            if name := last_of(records):
                move_last(self.path / name)
            ours = self.of_this_run(records)
            for old in to_delete(ours, self.retention, self.held):
                self._delete(old)
                del ours[old]
            return ours

    def on_commit(self, path: Path) -> None:
        """A new checkpoint has its name."""
        self.answered = path
        records = self.update()
        if last_of(records):  # not where a user has saved weights alone, before the first checkpoint
            self.on_update(records)

    def on_error(self, path: Path, error: OSError) -> Literal["retry", "skip", "raise"]:
        """A new checkpoint could not be written: on a full disk, make room once, else do without it."""
        if error.errno not in _DISK_FULL:
            return "raise"
        if self._retried != path and (name := self._make_room(path)):
            self._retried = path
            rank_zero_warn(f"SafeCheckpoint: {path}: {error.strerror}: deleted {name} to make room, and trying again")
            return "retry"
        self._retried, self.answered = None, path
        newest = self.newest()
        rank_zero_warn(
            f"SafeCheckpoint: {path} was not saved: {error.strerror}. Training goes on, and the next save tries again: "
            f"free some space. {f'The newest checkpoint is {newest}' if newest else 'There is no checkpoint yet'}"
        )
        return "skip"

    def sweep(self) -> None:
        """Clean up after a killed process: delete unfinished checkpoints, restore replaced ones, mend `last.ckpt`."""
        for leftover in self.path.glob(f".{_PATTERN}.*"):
            path = leftover.with_name(leftover.name[1:].rpartition(".")[0])
            if leftover == replaced_path(path) and not os.path.lexists(path):
                leftover.rename(path)
            elif leftover in (staging_path(path), replaced_path(path)):
                remove(leftover)
        newest = self.newest()
        if newest and not (self.path / LAST).exists():  # a link to another place may be the user's choice
            move_last(newest)

    def _make_room(self, new: Path) -> str | None:
        """Delete one checkpoint; returns its name, None where all must stay."""
        with self._lock:
            records = self.records()
            if name := to_make_room(self.of_this_run(records), self.retention, self.held | {new.name}):
                move_last(self.path / (last_of(records) or name))  # it never leads to a deleted checkpoint
                self._delete(name)
            return name

    def _delete(self, name: str) -> None:
        """Delete a checkpoint; a folder first loses its name, so that nobody finds half of one."""
        path = self.path / name
        if path.is_dir():
            remove(staging_path(path))
            path = path.rename(staging_path(path))
        remove(path)
        self.written.pop(name, None)
