"""Replace an older checkpoint by a new one, so that a kill at any moment leaves a whole one or none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks.checkpoints.check_checkpoint import is_folder_of_shards, is_of_deepspeed, replaced_path
from lightning_tricks.checkpoints.record import save_with_record


@contextmanager
def swap_in(path: Path) -> Iterator[Path]:
    """Give a path to write to; at the end, what was written gets the name `path`, and the older one is deleted.

    An error inside leaves `path` as it was.

    Args:
        path: file or folder, there or not.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint.
    """
    new = clear_staging(path)
    try:
        yield new
    except BaseException:
        remove(new)
        raise
    put_in_place(path)


def write_file(checkpoint: dict[str, Any], file: Path) -> None:
    """Save a checkpoint to the disk, with a record; it gets the name `file` when the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk; `file` is as it was.
    """
    with swap_in(file) as new:
        save_with_record(checkpoint, new)


def staging_path(path: Path) -> Path:
    """The path at which a new `path` is written: beside it, under a name that nobody takes for a checkpoint's."""
    return path.with_name(f".{path.name}.saving")


def clear_staging(path: Path) -> Path:
    """Delete what a killed process may have left at `staging_path(path)`; returns that path.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint.
    """
    if path.is_dir() and any(path.iterdir()) and not (is_folder_of_shards(path) or is_of_deepspeed(path)):
        raise UsageError(f"{path} is a folder of something else than a checkpoint: save under another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(staging_path(path))
    return staging_path(path)


def put_in_place(path: Path) -> None:
    """Rename `staging_path(path)` to `path`, then delete the older checkpoint of that name.

    A folder cannot take another's name in one rename: between two, the older one is at `replaced_path(path)`.

    If the older one cannot be deleted, a warning names its path, and the new one is saved all the same.

    Raises:
        OSError: what the file system says; the older checkpoint then has its name again, or a note says where it is.
    """
    new, old = staging_path(path), replaced_path(path)
    if path.is_file() and new.is_file():
        new.replace(path)
    else:
        older = os.path.lexists(path)
        if older:
            remove(old)
            path.rename(old)
        try:
            new.rename(path)
        except OSError as error:
            try:
                if older:
                    old.rename(path)
            except OSError:
                error.add_note(f"the older checkpoint is at {old}: rename it to {path}")
            raise
    fsync_path(path.parent)
    try:
        remove(old)
    except OSError as error:  # the new one is saved all the same
        rank_zero_warn(f"{path} is saved; the older checkpoint, at {old}, could not be deleted: {error}")


def fsync_path(path: Path) -> None:
    """Have the operating system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
