"""Write a checkpoint file, or put a new checkpoint in an older one's place: a kill leaves a whole one or none."""

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import rank_zero_warn
from lightning_tricks.checkpoints.check_checkpoint import is_folder_of_shards, is_of_deepspeed, replaced_path
from lightning_tricks.checkpoints.record import COMMENT_START, archive_checksum, record_of, to_json

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class FileForTorch:
    """A file that `torch.save` writes to. Keeps an error of the file system, for which torch raises another one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it."""
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Give the buffered bytes to the operating system."""
        self.file.flush()

    @contextmanager
    def raising_its_error(self) -> Iterator[None]:
        """Raise the file system's error in the place of torch's."""
        try:
            yield
        except RuntimeError as error:
            raise self.error or error from None


class ChecksummedFile(FileForTorch):
    """Keeps the CRC-32 of all that is written, so that nothing has to be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.checksum = 0

    def write(self, data: Any) -> int:
        """Write all of it."""
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def close(self) -> None:
        """Do nothing: DeepSpeed and torch call it, and `open_checksummed` closes the file."""


@contextmanager
def open_checksummed(file: Path) -> Iterator[ChecksummedFile]:
    """Open a new file for writing; at the end of the `with` the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    with file.open("wb") as opened:
        stream = ChecksummedFile(opened)
        with stream.raising_its_error():
            yield stream
        opened.flush()
        os.fsync(opened.fileno())


def save_with_record(checkpoint: Mapping[str, Any], path: Path) -> None:
    """`torch.save` to a new file, tensor by tensor, with the record behind it; at its end, the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    with path.open("wb") as file, locked(path):
        stream = FileForTorch(file)
        with stream.raising_its_error(), _tensor_checksums():
            torch.save(checkpoint, stream)  # type: ignore[arg-type]
            file.flush()
        record = replace(record_of(checkpoint), checksums={"": archive_checksum(path)})
        comment = COMMENT_START + to_json(record)
        file.seek(-2, 1)  # over the length of the comment, which torch has set to 0
        file.write(len(comment).to_bytes(2, "little") + comment)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _tensor_checksums() -> Iterator[None]:
    """Have torch write the checksum of each tensor, which a program may have switched off."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_file(checkpoint: dict[str, Any], file: Path) -> None:
    """Save a checkpoint to the disk, with a record; it gets the name `file` when the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk; `file` is as it was.
    """
    with swap_in(file) as new:
        save_with_record(checkpoint, new)


# ---- in the place of an older checkpoint


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
        remove(new)  # of this save: `clear_staging` has left nothing of that name, and what is there was written since
        raise
    put_in_place(path)


def staging_path(path: Path) -> Path:
    """The path at which a new `path` is written: beside it, under a name that nobody takes for a checkpoint's."""
    return path.with_name(f".{path.name}.saving")


def clear_staging(path: Path) -> Path:
    """Delete what a killed process may have left at `staging_path(path)`; returns that path.

    Raises:
        UsageError: `path` is a folder of something else than a checkpoint; another process writes it now.
    """
    if path.is_dir() and any(path.iterdir()) and not (is_folder_of_shards(path) or is_of_deepspeed(path)):
        raise UsageError(f"{path} is a folder of something else than a checkpoint: save under another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_locked(staging_path(path)):
        raise UsageError(
            f"{path}: another process is writing this checkpoint: two runs save to {path.parent}: give each a folder"
        )
    remove(staging_path(path))  # unfinished, by a killed save of `path`: no other program gives that hidden name
    return staging_path(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside the `with`, let other processes see that a file or folder is being written; a kill ends that, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether some process is inside `locked(path)`."""
    with suppress(OSError):  # it is not there, or its file system has no locks
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would have us wait
        try:
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


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
            remove(old)  # of a killed save of `path`, which had its new checkpoint in place: `path` is there
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
        remove(old)  # the checkpoint that the caller asked to replace: it was renamed here, or by a killed save
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
    """Delete a file or a folder, if it is there; the caller says whose it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
