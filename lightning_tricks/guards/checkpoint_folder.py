"""The folder of a run's checkpoints: which ones stay, `last.ckpt`, a full disk, the leftovers of killed processes.

What is deleted is always a checkpoint of this run: its record names the run, and its name is one that SafeCheckpoint
gives. Checkpoints of other runs, those whose record names none, and copies that the user made under other names are
neither counted nor deleted nor replaced.

Needs no Trainer. One process of a run, rank 0, changes the folder.
"""

import errno
import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import rank_zero_warn
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import identity, replaced_path
from lightning_tricks.checkpoints.record import Record, record_or_none
from lightning_tricks.checkpoints.write_file import fsync_path, is_locked, remove, staging_path

LAST = "last.ckpt"
Records = Mapping[str, Record]  # by the name of the file or folder
_PATTERN = "*.ckpt"
_LOCK = threading.Lock()  # around changes of a folder, which the thread that writes makes too
_READING = threading.Lock()  # so that what both threads meet at once is read by one of them
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the process's limit


# ---- which checkpoints stay, and which one `last` means: functions of their records alone


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay.

    Args:
        keep_last: the newest ones.
        keep_best: those with the best scores.
        mode: whether the lowest score is the best one, "min", or the highest, "max".
    """

    keep_last: int
    keep_best: int
    mode: Literal["min", "max"]


def last_of(records: Records) -> str | None:
    """The checkpoint that `last` means: the newest whose weights are finite numbers; where none is, the newest."""
    numbered = {name: record for name, record in records.items() if record.number > 0}
    whole = {name: record for name, record in numbered.items() if record.finite is not False}
    return _newest(whole) or _newest(numbered)


def best_first(records: Records, mode: str, keep: int) -> list[str]:
    """The `keep` checkpoints with the best scores, the best first; as with ModelCheckpoint, the older one of equals."""
    sign = -1 if mode == "max" else 1
    scored = [
        (sign * record.score, record.number, name)
        for name, record in records.items()
        if record.score is not None and math.isfinite(record.score) and record.finite is not False
    ]
    return [name for *_, name in sorted(scored)[:keep]]


def to_delete(records: Records, retention: Retention, protected: Collection[str] = ()) -> list[str]:
    """The checkpoints to delete, the oldest first.

    Never among them: permanent ones, the newest one whose weights are finite, `last_of(records)`, and any that
    SafeCheckpoint did not save, which have no number.

    Args:
        records: of every checkpoint of this run in the folder, the new one with them.
        retention: how many stay.
        protected: names that stay besides, such as the checkpoint that the run was resumed from.
    """
    candidates = _unprotected(records, retention, protected)
    newest = sorted(records, key=lambda name: records[name].number)[-retention.keep_last :]
    return [name for name in candidates if name not in newest]


def to_make_room(records: Records, retention: Retention, protected: Collection[str] = ()) -> str | None:
    """The checkpoint to delete on a full disk, before a new one is there: the next to go; None where all must stay.

    One with weights that are not finite goes first, then the oldest. What `to_delete` never names stays here too.
    """
    candidates = _unprotected(records, retention, protected)
    return min(candidates, key=lambda name: (records[name].finite is not False, records[name].number), default=None)


def _unprotected(records: Records, retention: Retention, protected: Collection[str]) -> list[str]:
    """The checkpoints that no rule but `keep_last` protects, the oldest first."""
    finite = {name: record for name, record in records.items() if record.number > 0 and record.finite}
    best = best_first(records, retention.mode, retention.keep_best)
    stay = {*protected, *best, _newest(finite), last_of(records)}
    ours = [name for name, record in records.items() if record.number > 0 and not record.permanent]
    return sorted(set(ours) - stay, key=lambda name: records[name].number)


def _newest(records: Records) -> str | None:
    return max(records, key=lambda name: (records[name].number, name), default=None)


# ---- `last.ckpt`, the name that leads to the newest checkpoint


def move_last(target: Path) -> None:
    """Let `last.ckpt` beside a checkpoint lead to it, by a relative symbolic link.

    At every moment a reader finds the older or the newer one. A `last.ckpt` that is no link is renamed to
    `foreign-last.ckpt`, or to `foreign-last-v1.ckpt` and so on where that name is taken.

    Raises:
        UsageError: the file system has no symbolic links.
        OSError: the disk is full.
    """
    last = target.with_name(LAST)
    if last.is_symlink() and os.readlink(last) == target.name:
        return
    if os.path.lexists(last) and not last.is_symlink():
        last.rename(_free_name(last.with_name(f"foreign-{LAST}")))
    new = staging_path(last)
    remove(new)  # a link that a killed process had not put in place: nobody else gives that hidden name
    try:
        new.symlink_to(target.name)
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise
        raise UsageError(
            f"SafeCheckpoint: dirpath={target.parent}: {LAST} must be a symbolic link, which cannot be made here "
            f"({error.strerror}): give a folder of another file system, or take ModelCheckpoint"
        ) from error
    new.replace(last)
    fsync_path(last.parent)


def _free_name(path: Path, ours: Collection[str] = (), taken: Collection[str] = ()) -> Path:
    """The path, with the first of -v1, -v2, ... that is not taken, or is one of ours, if it is."""
    versions = (path.with_stem(f"{path.stem}-v{version}") for version in itertools.count(1))
    paths = itertools.chain([path], versions)
    return next(new for new in paths if new.name in ours or not (new.name in taken or os.path.lexists(new)))


# ---- the folder


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
        self.place: Path | str = path  # for messages
        self.protected: set[str] = set()  # names of checkpoints that stay whatever their age
        self.stored: dict[str, Record] = {}  # whole ones of a bucket, by their names, see BucketFolder
        self.taken: set[str] = set()  # all names in it
        self._known: dict[str, tuple[list[int], Record | None]] = {}  # by name: the file's identity, and its record
        self._retried: Path | None = None

    def record(self, path: Path) -> Record | None:
        """The record of a checkpoint without its checksums; opens no file that is as it was when it was last asked."""
        file = identity(path)
        if not file:
            return None
        with _READING:
            known = self._known.get(path.name)
            if known is None or known[0] != file:
                record = record_or_none(path)
                known = self._known[path.name] = file, record and replace(record, checksums={})
            return known[1]

    def records(self) -> dict[str, Record]:
        """The records of all checkpoints that have one; those of other programs, and damaged ones, are left out."""
        found = {path.name: self.record(path) for path in self.path.glob(_PATTERN) if path.name != LAST}
        return {name: record for name, record in found.items() if record}

    def all_records(self) -> dict[str, Record]:
        """Those of the bucket too."""
        return {**self.stored, **self.records()}

    def of_this_run(self, records: Records) -> dict[str, Record]:
        """Those of the records that name this run, by the names that `path_of` gives: others are a user's copies."""
        return {
            name: record
            for name, record in records.items()
            if record.run == self.run and re.fullmatch(rf"step={record.step}(-not-finite)?(-v\d+)?\.ckpt", name)
        }

    def line_on_others(self) -> str | None:
        """The line that tells of checkpoints that this run did not write; None where there are none."""
        records = {name: record for name, record in self.all_records().items() if record.number > 0}
        others = records.keys() - self.of_this_run(records).keys()
        if not others:
            return None
        newest = max(others, key=lambda name: records[name].number)
        return (
            f"SafeCheckpoint: {self.place} holds checkpoints that this run did not write ({len(others)}, the newest is "
            f"{newest}): it neither counts nor deletes them, so delete yourself what you do not need"
        )

    def largest_number(self) -> int:
        """The number of the newest checkpoint, 0 where there is none."""
        return max((record.number for record in self.all_records().values()), default=0)

    def newest(self) -> Path | None:
        """The path of the checkpoint that `last` means."""
        name = last_of(self.records())
        return self.path / name if name else None

    def path_of(self, record: Record) -> Path:
        """The path for a new checkpoint, `step=N.ckpt`.

        Where a file of another run or program has that name, it is `step=N-v1.ckpt`; where the new weights are not
        finite and those of the older checkpoint are, `step=N-not-finite.ckpt`.
        """
        name, ours = f"step={record.step}", self.of_this_run(self.all_records())
        older = ours.get(f"{name}.ckpt")
        if record.finite is False and older and older.finite:
            name += "-not-finite"
        return _free_name(self.path / f"{name}.ckpt", ours.keys() - self.taken, self.taken)

    def shown(self, name: str) -> str:
        """The path of a checkpoint; the address of one that only the bucket has."""
        return str(self.path / name)

    def start(self) -> None:
        """Begin to train."""

    def wait(self) -> None:
        """Return when nothing is being uploaded."""

    def protect(self, path: Path) -> None:
        """Keep a checkpoint, or the one to which a link leads, whatever its age."""
        real = Path(os.path.realpath(path))
        self.protected = {real.name} if real.parent == Path(os.path.realpath(self.path)) else set()

    def update(self) -> Records:
        """Move `last.ckpt` to the newest finite checkpoint, then delete what need not stay; returns this run's records.

        Idempotent. Called when a new checkpoint has its name, so that nothing is deleted before.
        """
        with _LOCK:
            records = self.records()
            ours = self.of_this_run(records)
            if name := last_of(records):
                try:
                    move_last(self.path / name)
                except OSError as error:  # the older one, to which it leads, must stay
                    rank_zero_warn(f"SafeCheckpoint: {self.path / LAST} links to an older checkpoint: {error.strerror}")
                    return ours
            local = {  # a permanent one stays in the bucket
                name: replace(record, permanent=record.permanent and name not in self.stored)
                for name, record in ours.items()
            }
            for old in to_delete(local, self.retention, self.protected):
                self._delete(old)
                del ours[old]
            return ours

    def on_commit(self, path: Path) -> None:
        """A new checkpoint has its name."""
        self.update()
        records = self.of_this_run(self.all_records())
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
        self._retried = None
        newest = self.newest()
        rank_zero_warn(
            f"SafeCheckpoint: {path} was not saved: {error.strerror}. Training continues, the next save tries again: "
            f"free some space. {f'The newest checkpoint is {newest}' if newest else 'There is no checkpoint yet'}"
        )
        return "skip"

    def problem(self) -> str:
        """Why nothing can be saved here, however much room there is; empty where it can."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            return f"{self.path}: {there} is a file: give another folder"
        allowed = os.access(there, os.W_OK | os.X_OK)
        return "" if allowed else f"{self.path}: this process may not write to {there}: give another folder"

    def sweep(self) -> None:
        """Clean up after a killed process: delete unfinished checkpoints, restore replaced ones, mend `last.ckpt`."""
        for leftover in self.path.glob(f".{_PATTERN}.*"):
            path = leftover.with_name(leftover.name[1:].rpartition(".")[0])
            if leftover == replaced_path(path) and not os.path.lexists(path):
                leftover.rename(path)
            elif leftover in (staging_path(path), replaced_path(path)) and not is_locked(leftover):
                # of a killed save, by a hidden name that nobody else gives; what it replaced has its name
                remove(leftover)
        newest = self.newest()
        if newest and not (self.path / LAST).exists():  # a link to another place may be the user's choice
            move_last(newest)

    def _make_room(self, new: Path) -> str | None:
        """Delete one checkpoint; returns its name, None where all must stay."""
        with _LOCK:
            records = self.records()
            if name := to_make_room(self.of_this_run(records), self.retention, self.protected | {new.name}):
                move_last(self.path / (last_of(records) or name))  # it never leads to a deleted one
                self._delete(name)
            return name

    def _delete(self, name: str) -> None:
        """Delete a checkpoint; a folder first loses its name, so that nobody finds half of one.

        It is one of this run: the callers take the name from `of_this_run`, thus by the run in its record.
        """
        path = self.path / name
        if path.is_dir():
            remove(staging_path(path))  # unfinished, by a killed save or deletion of the same checkpoint
            path = path.rename(staging_path(path))
        remove(path)
        self._known.pop(name, None)


def report_writes(io: AtomicCheckpointIO, folders: Sequence[CheckpointFolder]) -> None:
    """Have the CheckpointIO report each write, done or failed, to the folder in which it is."""

    def of(path: Path) -> list[CheckpointFolder]:
        return [folder for folder in folders if os.path.realpath(path.parent) == os.path.realpath(folder.path)]

    def on_commit(path: Path) -> None:
        for folder in of(path):
            folder.on_commit(path)

    def on_error(path: Path, error: OSError) -> Literal["retry", "skip", "raise"]:
        return next((folder.on_error(path, error) for folder in of(path)), "raise")  # somebody else asked for it

    io.on_commit, io.on_error = on_commit, on_error
