"""Write the zip archive of `torch.save` as a stream, and check its bytes by the checksums that it has inside.

torch writes a CRC-32 of each tensor into the archive. One more checksum, of the bytes between the tensors, covers the
rest, so a save needs no second pass over the tensors.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_tricks.checkpoints.checksummed_file import FileForTorch

# What Python's zipfile raises on an archive with changed bytes, besides the file system's errors.
DAMAGED_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, LookupError, StopIteration,
    OverflowError, MemoryError,
)  # fmt: skip
_HEADER = 30  # bytes before an entry's name; the last four of them are the lengths of the name and of the extra field
_BLOCK = 1 << 20  # bytes read at once
_THREADS = 4  # that read one file; on a host with several GPUs each process has as many


def write_archive(checkpoint: Mapping[str, Any], file: IO[bytes]) -> int:
    """`torch.save` into a file opened for writing, tensor by tensor, without copying a tensor in memory.

    Returns:
        The checksum that `archive_damage` takes.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    stream = FileForTorch(file)
    with stream.raising_its_error(), _tensor_checksums():
        torch.save(checkpoint, stream)  # type: ignore[arg-type]
        file.flush()
    path = Path(file.name)
    return _checksum_between(path, _contents(path))


@contextmanager
def _tensor_checksums() -> Iterator[None]:
    """Have torch write the checksum of each tensor, which a program may have switched off."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def archive_damage(file: Path, checksum: int) -> str | None:
    """Where an archive differs from what was written, as a clause; None if every byte before its comment is the same.

    Args:
        file: the archive.
        checksum: what `write_archive` has returned.

    Raises:
        OSError: the file cannot be read.
        zipfile.BadZipFile: it is no zip archive; damage in it may raise any of `DAMAGED_ARCHIVE`.
    """
    contents = _contents(file)
    if _checksum_between(file, contents) != checksum:
        return f"{file} has other bytes than were written"
    small = sum(content.length for content in contents) < _BLOCK
    with nullcontext() if small else ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        results = (pool.map if pool else map)(lambda content: _is_as_written(file, content), contents)
        for content, same in zip(contents, results, strict=True):
            if not same:
                return f"{file} has other bytes in {content.name} than were written"
    return None


class _Content(NamedTuple):
    """The bytes of one entry: what was given to the archive under a name."""

    name: str
    start: int  # first byte in the file
    length: int
    checksum: int


def _contents(file: Path) -> list[_Content]:
    """The contents of all entries in the file's order, and an empty one where the archive ends, before its comment."""
    found = []
    with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
            opened.seek(entry.header_offset + _HEADER - 4)
            lengths = opened.read(4)
            before = _HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            found.append(_Content(entry.filename, entry.header_offset + before, entry.compress_size, entry.CRC))
        end = opened.seek(0, os.SEEK_END) - len(archive.comment) - 2
    return [*found, _Content("", end, 0, 0)]


def _checksum_between(file: Path, contents: list[_Content]) -> int:
    """CRC-32 of all bytes but the contents, the comment and the comment's length."""
    checksum = position = 0
    with file.open("rb") as opened:
        for content in contents:
            opened.seek(position)
            checksum = zlib.crc32(opened.read(max(0, content.start - position)), checksum)
            position = content.start + content.length
    return checksum


def _is_as_written(file: Path, content: _Content) -> bool:
    checksum, length = 0, content.length
    buffer = memoryview(bytearray(min(length, _BLOCK)))
    with file.open("rb", buffering=0) as opened:
        opened.seek(content.start)
        while length > 0 and (count := opened.readinto(buffer[: min(length, _BLOCK)])):
            checksum = zlib.crc32(buffer[:count], checksum)
            length -= count
    return length == 0 and checksum == content.checksum
