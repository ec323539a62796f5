"""A checkpoint folder that all ranks write, verify and open together.

A kill or a full disk at any moment leaves the older checkpoint, and all ranks open one or refuse it.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.bucket import is_mirror
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.open_checkpoint import is_first_of_host
from lightning_tricks.checkpoints.record import RECORD_FILE, Record, damage, read_record, to_json
from lightning_tricks.checkpoints.write_file import (
    clear_staging,
    fsync_path,
    is_locked,
    locked,
    put_in_place,
    remove,
    staging_path,
)
from lightning_tricks.parallel.agreement import on_all_ranks, on_rank_0

T = TypeVar("T")
WriteFiles = Callable[[Path], Mapping[str, int]]


class FolderWriter:
    """Writes checkpoints as folders, at once or in the background; each rank has one.

    Args:
        timeout: how long a thread that writes waits for those of other ranks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._group: Any = None  # of gloo, made when it is first needed: the thread shares no group with training

    def save(
        self, path: Path, state: Any, write: Callable[..., Mapping[str, int]], record: Record, checkpoint_io: Any
    ) -> None:
        """Save this rank's `state`; every rank must call. See `write_folder`.

        Where `checkpoint_io.asynchronous`, it returns when an earlier checkpoint is complete and `state` has been
        copied to the host; a thread does the rest, and an error of it is raised by the next save.

        Args:
            path: see `write_folder`.
            state: nested, of this rank.
            write: called as `write(state, folder, group)`, see `write_folder`; in the background with the copy, and
                with a process group of gloo, else with the default one, None.
            record: see `write_folder`.
            checkpoint_io: see `write_folder`.
        """
        if not getattr(checkpoint_io, "asynchronous", False):
            write_folder(path, lambda folder: write(state, folder, None), record, checkpoint_io)
            return
        checkpoint_io.wait()
        self._group = group = self._group or dist.new_group(backend="gloo", timeout=self.timeout)

        def write_copy(copy: Any) -> None:
            write_folder(path, lambda folder: write(copy, folder, group), record, checkpoint_io, group)

        checkpoint_io.write_in_background(state, write_copy)


def write_folder(path: Path, write: WriteFiles, record: Record, checkpoint_io: Any = None, group: Any = None) -> None:
    """Write a folder beside its place and rename it when the disk has all of it; every rank must call.

    The folder is complete when it has `record.json`, which is written last and has a checksum of each file. An error of
    the file system on any rank is an error on all of them; nothing of the new folder is then left. Rank 0 asks
    `checkpoint_io.on_error` whether to write again, to do without this checkpoint or to raise the error, which is done
    where there is no such method, and all ranks follow. At the end rank 0 calls `checkpoint_io.on_commit`.

    Args:
        path: the folder, there or not; equal on all ranks.
        write: writes this rank's files into the folder that it is given, to the disk, and returns the CRC-32 of each by
            its name in the folder. It may be called again.
        record: of the checkpoint; its checksums are set here.
        checkpoint_io: an AtomicCheckpointIO; a plugin without these methods is not used.
        group: the process group that communicates; None for the default one.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint.
        OSError: what the file system says.
    """
    while True:
        try:
            has_renamed = _write_once(path, write, record, group)
            break
        except OSError as error:
            on_error = getattr(checkpoint_io, "on_error", None)
            answer = on_rank_0(partial(on_error, path, error) if on_error else lambda: "raise", group)
            if answer == "raise":
                raise
            if answer == "skip":
                return
    on_commit = getattr(checkpoint_io, "on_commit", None)
    on_all_ranks(partial(on_commit, path) if on_commit and has_renamed else lambda: None, group)


def _write_once(path: Path, write: WriteFiles, record: Record, group: Any) -> bool:
    """Returns whether this process has renamed the folder: rank 0; of a bucket, the first of each host that has one."""
    folder, lock = staging_path(path), ExitStack()
    leads_host = dist.get_rank(group) > 0 and is_mirror(path) and is_first_of_host()

    def begin() -> None:
        clear_staging(path).mkdir()
        lock.enter_context(locked(folder))

    try:
        with lock:
            on_rank_0(begin, group)
            on_all_ranks(lambda: begin() if leads_host and not folder.exists() else None, group)
            parts = on_all_ranks(lambda: write(folder), group)
            checksums = {name: checksum for part in parts for name, checksum in part.items()}
            whole = replace(record, checksums=checksums)
            on_rank_0(lambda: _commit(path, folder, whole), group)
            has_own = leads_host and folder.exists()
            on_all_ranks(lambda: _commit(path, folder, whole) if has_own else None, group)
            return has_own or dist.get_rank(group) == 0
    except BaseException:
        if (dist.get_rank(group) == 0 or leads_host) and not is_locked(folder):  # else it is another process's
            with suppress(OSError):
                remove(folder)  # the unfinished one of this save; or a full disk would stay full
        raise


def _commit(path: Path, folder: Path, record: Record) -> None:
    with (folder / RECORD_FILE).open("wb") as file:
        file.write(to_json(record))
        file.flush()
        os.fsync(file.fileno())
    for inner in (*(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        fsync_path(inner)
    put_in_place(path)


def check_together(path: Any) -> Path:
    """`check_checkpoint` on every rank, so that no rank goes on and waits for one that refuses; every rank must call.

    Raises:
        UsageError: on all ranks, the message of the first rank that cannot open it.
        OSError: on all ranks, what the file system says on one of them.
    """
    return read_together(lambda: check_checkpoint(path))


def read_together(read: Callable[[], T]) -> T:
    """Read something of a checkpoint on every rank; every rank must call.

    Args:
        read: does not communicate; its result can be pickled.

    Returns:
        The result of this rank.

    Raises:
        UsageError: on all ranks, the message of the first rank that raises one.
        Exception: see `on_all_ranks`.
    """

    def result_and_problem() -> tuple[Any, str | None]:
        try:
            return read(), None
        except UsageError as error:
            return None, str(error)

    told = on_all_ranks(result_and_problem)
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            everywhere = all(other is not None for _, other in told)
            hint = "" if everywhere else f" (on rank {rank}: a checkpoint lies where all ranks see it)"
            raise UsageError(problem + hint)
    result: T = told[dist.get_rank()][0]
    return result


def was_verified(checkpoint_io: Any, path: Path) -> bool:
    """Whether the command that has chosen a checkpoint has verified it, for every rank; every rank must call."""
    ask = getattr(checkpoint_io, "was_verified", None)
    return all(on_all_ranks(lambda: ask is not None and ask(path)))


def verify_together(folder: Path, checkpoint_io: Any = None) -> None:
    """Compare every file of a folder with its record, each rank its share of the files; every rank must call.

    A folder without a record has no checksums, so nothing is compared. Nor is one that `was_verified`.

    Raises:
        UsageError: on all ranks, naming a file that has other bytes than were written; a checkpoint of a newer version.
    """
    record = on_rank_0(lambda: read_record(folder))
    if record is None or was_verified(checkpoint_io, folder):
        return
    own = sorted(record.checksums)[dist.get_rank() :: dist.get_world_size()]
    share = {name: record.checksums[name] for name in own}
    for found in on_all_ranks(lambda: damage(folder, record, share)):
        if found:
            raise UsageError(f"damaged: {found}: take an older checkpoint")
