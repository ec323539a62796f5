"""`last.ckpt`: the name that leads to the newest checkpoint, moved so that a reader always finds one."""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.record import Record, read_record
from lightning_tricks.checkpoints.swap_in import fsync_path, put_in_place, remove, staging_path

LAST = "last.ckpt"


def record_or_none(path: Path) -> Record | None:
    """The record of a checkpoint; None also where it is damaged or of a later version."""
    try:
        return read_record(path)
    except UsageError:
        return None


def move_last(target: Path) -> None:
    """Let `last.ckpt` beside a checkpoint lead to it: a relative link, else a hard link, else a copy.

    At every moment a reader finds the older or the newer one. (Of folders, where links are impossible, it finds for a
    moment neither.) A `last.ckpt` that SafeCheckpoint did not make is renamed to `foreign-last.ckpt`,
    or to `foreign-last-v1.ckpt` and so on where that name is taken.
    """
    last = target.with_name(LAST)
    if last.is_symlink() and os.readlink(last) == target.name:
        return
    if os.path.lexists(last) and not last.is_symlink():
        record = record_or_none(last)
        if record is None or record.number == 0:
            last.rename(_free_name(last.with_name(f"foreign-{LAST}")))
        elif record == record_or_none(target):
            return
    new = staging_path(last)
    remove(new)
    _link_or_copy(target, new)
    if new.is_symlink() or new.is_file():
        new.replace(last)
        fsync_path(last.parent)
    else:
        put_in_place(last)


def _free_name(path: Path) -> Path:
    """The path, with the first of -v1, -v2, ... that is not taken if it is."""
    versions = (path.with_stem(f"{path.stem}-v{version}") for version in itertools.count(1))
    return next(free for free in itertools.chain([path], versions) if not os.path.lexists(free))


def _link_or_copy(target: Path, new: Path) -> None:
    with contextlib.suppress(OSError):
        new.symlink_to(target.name)
        return
    if target.is_dir():
        shutil.copytree(target, new, copy_function=_hard_link_or_copy)
    else:
        _hard_link_or_copy(target, new)


def _hard_link_or_copy(source: str | Path, new: str | Path) -> None:
    try:
        os.link(source, new)
    except OSError:
        shutil.copyfile(source, new)
        fsync_path(Path(new))
