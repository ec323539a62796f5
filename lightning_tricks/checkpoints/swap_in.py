"""Put a new checkpoint in the place of an older one, so that a kill at any moment leaves a whole one or none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import is_folder_of_shards, replaced


@contextmanager
def swap_in(path: Path) -> Iterator[Path]:
    """Give a place to write to; what is there at the end gets the name `path`, and what had it is deleted.

    An error inside leaves `path` as it was.

    Args:
        path: file or folder, there or not.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint.
    """
    new = clear_place(path)
    try:
        yield new
    except BaseException:
        remove(new)
        raise
    put_in_place(path)


def place_of(path: Path) -> Path:
    """Where what shall be `path` is written: beside it, under a name that nobody takes for a checkpoint's."""
    return path.with_name(f".{path.name}.saving")


def clear_place(path: Path) -> Path:
    """Make room at `place_of(path)`, where a killed process may have left something; returns it.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint.
    """
    if path.is_dir() and any(path.iterdir()) and not is_folder_of_shards(path):
        raise UsageError(f"{path} is a folder of something else than a checkpoint: save under another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(place_of(path))
    return place_of(path)


def put_in_place(path: Path) -> None:
    """Give what is at `place_of(path)` the name `path`, then delete what had it.

    A folder cannot take another's name in one go: between two renames the older one is at `replaced(path)`.

    Raises:
        OSError: what the file system says; the older checkpoint then has its name again, or a note says where it is.
    """
    new, old = place_of(path), replaced(path)
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
            if older:
                _take_back(old, path, error)
            raise
    fsync_path(path.parent)
    remove(old)


def _take_back(old: Path, path: Path, error: OSError) -> None:
    """Give the older checkpoint its name again; where that fails too, `error`, the cause of both, says where it is."""
    try:
        old.rename(path)
    except OSError:
        error.add_note(f"the older checkpoint is at {old}: rename it to {path}")


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
