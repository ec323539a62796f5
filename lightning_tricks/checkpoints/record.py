"""The record of a checkpoint: its step, its place in the order of saves, its checksums; read without opening a tensor.

In a file it is the comment of the zip archive that `torch.save` writes, in a folder of shards `record.json`. Other
programs do not see it: torch and Lightning open the file as any other.

All checksums are CRC-32. That of a checkpoint of one file covers the bytes between the tensors: torch writes one of
each tensor into the archive, so a save needs no second pass over them.
"""

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import inside

KEY = "lightning_tricks"  # in a checkpoint: a dict, of which the entry "record" is a Record's content
RECORD_FILE = "record.json"  # in a folder of shards, written last
VERSION = 1  # of the record and of what KEY holds; raised when a version before could not read it
COMMENT_START = b"lightning_tricks "
# What Python's zipfile raises on an archive with changed bytes, besides the file system's errors.
DAMAGED_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, LookupError, StopIteration,
    OverflowError, MemoryError,
)  # fmt: skip
_HEADER = 30  # bytes before an entry's name; the last four of them are the lengths of the name and of the extra field
_BLOCK = 1 << 20  # bytes read at once
_THREADS = 8  # that read one file: one process of a host does it for all


@dataclass(frozen=True)
class Record:
    """The facts about a checkpoint that are known without opening it.

    Args:
        step: optimizer steps done.
        number: counts the saves in a folder, over restarts: the newest checkpoint has the largest.
        finite: whether every weight is a finite number; None if nobody has looked.
        score: the monitored metric, if there is one.
        permanent: whether it shall never be deleted.
        version: see `VERSION`.
        run: identifier of the run, made at its start and kept when it is resumed; None where it is not known.
        checksums: of each file, by its name in the folder; of one file, by the name "", what `archive_checksum` gives.
    """

    step: int = 0
    number: int = 0
    finite: bool | None = None
    score: float | None = None
    permanent: bool = False
    version: int = VERSION
    run: str | None = None
    checksums: Mapping[str, int] = field(default_factory=dict)


def record_of(checkpoint: Mapping[str, Any]) -> Record:
    """The record that a checkpoint brings under `KEY`, without checksums; if it brings none, a record of its step."""
    given = checkpoint.get(KEY, {}).get("record", {})
    return Record(**{"step": int(checkpoint.get("global_step", 0)), **given})


def read_record(path: Path) -> Record | None:
    """The record of a file or a folder of shards; None where it has none: another program wrote it, or not to its end.

    Raises:
        UsageError: the record is damaged, or of a later version of the collection.
    """
    file = inside(path, path / RECORD_FILE) if path.is_dir() else path
    if not file.is_file():  # on a pipe, reading would wait for ever
        return None
    try:
        text = file.read_bytes() if file != path else _comment(path)
    except (*DAMAGED_ARCHIVE, OSError):
        return None
    return parse_record(text, path)


def parse_record(text: bytes, path: Any) -> Record | None:
    """The record of a checkpoint at `path`, of the text that `to_json` gives; see `read_record`."""
    if not text:
        return None
    try:
        outer = json.loads(text)
        content = outer["record"]
        if outer["crc32"] != zlib.crc32(json.dumps(content).encode()) or type(content["version"]) is not int:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"damaged: the record of {path} has other bytes than were written") from None
    if content["version"] > VERSION:
        raise UsageError(
            f"{path} is of version {content['version']}, this lightning_tricks reads up to {VERSION}: update the clone"
        )
    if content.keys() - {entry.name for entry in fields(Record)} or not _is_record(record := Record(**content)):
        raise UsageError(f"damaged: the record of {path} has other entries than are written")
    return record


def _is_record(record: Record) -> bool:
    """Whether the values have their types: a checksum does not tell, as whoever writes a file writes that too."""
    return (
        type(record.checksums) is dict
        and all(type(count) is int for count in (record.step, record.number, *record.checksums.values()))
        and record.finite in (None, True, False)
        and type(record.score) in (type(None), int, float)
        and type(record.permanent) is bool
        and type(record.run) in (type(None), str)
    )


def record_or_none(path: Path) -> Record | None:
    """The record of a checkpoint; None also where it is damaged or of a later version."""
    try:
        return read_record(path)
    except UsageError:
        return None


def _comment(path: Path) -> bytes:
    """The comment of a zip archive without the word that it starts with; empty where another program wrote it."""
    with zipfile.ZipFile(path) as archive:
        comment = archive.comment
    return comment.removeprefix(COMMENT_START) if comment.startswith(COMMENT_START) else b""


def to_json(record: Record) -> bytes:
    """A record as the text that `read_record` reads."""
    content = asdict(record)
    return json.dumps({"record": content, "crc32": zlib.crc32(json.dumps(content).encode())}).encode()


# ---- checksums


def checksum_of(file: Path, spans: Iterable[tuple[int, int]] | None = None) -> int:
    """CRC-32 of a file, or of the bytes from each start to each end, one after the other."""
    checksum = 0
    with file.open("rb", buffering=0) as opened:
        spans = [(0, os.fstat(opened.fileno()).st_size)] if spans is None else list(spans)
        buffer = memoryview(bytearray(min(_BLOCK, max((end - start for start, end in spans), default=0))))
        for start, end in spans:
            opened.seek(start)
            while start < end and (count := opened.readinto(buffer[: end - start])):
                checksum = zlib.crc32(buffer[:count], checksum)
                start += count
    return checksum


def archive_checksum(file: Path) -> int:
    """The checksum of a file of `torch.save`: of all bytes but its tensors, its comment and the comment's length."""
    return _checksum_between(file, _contents(file))


def damage(path: Path, record: Record | None, names: Mapping[str, int] | None = None) -> str | None:
    """The first file of a checkpoint with other bytes than were written, as a clause; None where there is none.

    Args:
        path: file or folder.
        record: of `read_record(path)`; None for a file or folder of another program: then torch's own checksums of the
            tensors in a file are compared, and nothing of a folder.
        names: the part of `record.checksums` to compare, where several processes share the work.
    """
    if record is None:
        checksums: Mapping[str, int | None] = {"": None} if path.is_file() and zipfile.is_zipfile(path) else {}
    else:
        checksums = record.checksums if names is None else names
    for name, expected in checksums.items():
        file = inside(path, path / name) if name else path
        try:
            if not name:
                found = _archive_damage(file, expected)
            elif file.exists() and not file.is_file():
                found = f"{file} is no file"
            else:
                found = None if checksum_of(file) == expected else f"{file} has other bytes than were written"
        except (*DAMAGED_ARCHIVE, OSError) as error:
            return f"{file} cannot be read ({error})"
        if found:
            return found
    return None


def _archive_damage(file: Path, checksum: int | None) -> str | None:
    """The same of an archive; without a checksum, of the bytes that zipfile checks."""
    contents = _contents(file)
    with file.open("rb") as opened:
        opened.seek(contents[-1].start)
        length, comment = int.from_bytes(opened.read(2), "little"), opened.read()
    if checksum is None and length:  # torch writes no comment
        return f"{file} has a damaged record"
    if checksum is None:
        with zipfile.ZipFile(file) as archive:
            entry = archive.testzip()
        return f"{file} has other bytes in {entry} than were written" if entry else None
    if length != len(comment):
        return f"{file} has other bytes at its end than were written"
    if _checksum_between(file, contents) != checksum:
        return f"{file} has other bytes than were written"
    small = sum(content.end - content.start for content in contents) < _BLOCK
    with nullcontext() if small else ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        found = (pool.map if pool else map)(lambda content: checksum_of(file, [content[1:3]]), contents)
        for content, same in zip(contents, found, strict=True):
            if same != content.checksum:
                return f"{file} has other bytes in {content.name} than were written"
    return None


class _Content(NamedTuple):
    """The bytes of one entry of an archive: what was given to it under a name."""

    name: str
    start: int  # first byte in the file
    end: int
    checksum: int


def _contents(file: Path) -> list[_Content]:
    """The contents of all entries in the file's order, and an empty one where the archive ends, before its comment."""
    found = []
    with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
            opened.seek(entry.header_offset + _HEADER - 4)
            lengths = opened.read(4)
            before = _HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            start = entry.header_offset + before
            found.append(_Content(entry.filename, start, start + entry.compress_size, entry.CRC))
        end = opened.seek(0, os.SEEK_END) - len(archive.comment) - 2
    return [*found, _Content("", end, end, 0)]


def _checksum_between(file: Path, contents: list[_Content]) -> int:
    gaps = pairwise([_Content("", 0, 0, 0), *contents])
    return checksum_of(file, [(before.end, after.start) for before, after in gaps])
