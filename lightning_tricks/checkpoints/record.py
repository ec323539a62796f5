"""The record of a checkpoint: its step, its place in the order of saves, its checksums; read without opening a tensor.

In a file it is the comment of the zip archive that `torch.save` writes, in a folder of shards `record.json`. Other
programs do not see it: torch and Lightning open the file as any other.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._errors import UsageError

KEY = "lightning_tricks"  # in a checkpoint: a dict, of which the entry "record" is a Record's content
RECORD_FILE = "record.json"  # in a folder of shards, written last
VERSION = 1  # of the record and of what KEY holds; raised when an older version could not read it
_START = b"lightning_tricks "  # of the comment
_BLOCK = 1 << 22  # bytes read at once


@dataclass(frozen=True)
class Record:
    """What is known of a checkpoint without opening it.

    Args:
        step: optimizer steps done.
        number: counts the saves of a run, over restarts: the newest checkpoint has the largest.
        finite: whether every weight is a finite number; None if nobody has looked.
        score: the monitored metric, if there is one.
        permanent: whether it shall never be deleted.
        version: see `VERSION`.
        checksums: CRC-32 of each file, by its name in the folder; of a checkpoint of one file by the name "".
    """

    step: int = 0
    number: int = 0
    finite: bool | None = None
    score: float | None = None
    permanent: bool = False
    version: int = VERSION
    checksums: Mapping[str, int] = field(default_factory=dict)


def record_of(checkpoint: Mapping[str, Any]) -> Record:
    """The record that a checkpoint carries to its writer, or one of its step alone."""
    given = checkpoint.get(KEY, {}).get("record", {})
    return Record(**{"step": int(checkpoint.get("global_step", 0)), **given})


def read_record(path: Path) -> Record | None:
    """The record of a file or a folder of shards; None where it has none: another program wrote it, or not to its end.

    Raises:
        UsageError: the record is damaged, or of a later version of the collection.
    """
    try:
        text = (path / RECORD_FILE).read_bytes() if path.is_dir() else _comment(path)
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return None
    if not text:
        return None
    try:
        outer = json.loads(text)
        content = outer["record"]
        if outer["crc32"] != zlib.crc32(json.dumps(content).encode()):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"damaged: the record of {path} has other bytes than were written") from None
    if content["version"] > VERSION:
        raise UsageError(
            f"{path} is a checkpoint of version {content['version']}, and this lightning_tricks reads up to {VERSION}: "
            "pip install -U lightning-tricks"
        )
    return Record(**content)


def _comment(path: Path) -> bytes:
    """The comment of a zip archive without the word that it starts with; empty where another program wrote it."""
    with zipfile.ZipFile(path) as archive:
        comment = archive.comment
    return comment.removeprefix(_START) if comment.startswith(_START) else b""


def to_json(record: Record) -> bytes:
    """A record as the text that `read_record` reads."""
    content = asdict(record)
    return json.dumps({"record": content, "crc32": zlib.crc32(json.dumps(content).encode())}).encode()


class _ChecksummedFile:
    """A file that `torch.save` writes to: keeps the CRC-32 of all it gets, and the error that torch would swallow."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.checksum = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_with_record(checkpoint: Mapping[str, Any], file: IO[bytes]) -> None:
    """`torch.save` into a file opened for writing, as a stream, with the record behind it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    stream = _ChecksummedFile(file)
    try:
        torch.save(checkpoint, stream)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise stream.error or error from None
    record = replace(record_of(checkpoint), checksums={"": stream.checksum})
    comment = _START + to_json(record)
    file.seek(-2, 1)  # over the length of the comment, which torch has set to 0
    file.write(len(comment).to_bytes(2, "little") + comment)


def checksum_of(file: Path, length: int | None = None) -> int:
    """CRC-32 of a file, or of its first `length` bytes."""
    checksum = 0
    for block in _blocks(file, file.stat().st_size if length is None else length):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _blocks(file: Path, length: int) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as opened:
        while length > 0 and (block := opened.read(min(length, _BLOCK))):
            length -= len(block)
            yield block


def damage(path: Path, record: Record, names: Mapping[str, int] | None = None) -> str | None:
    """The first file of a checkpoint that differs from its record, as a clause; None where every byte is as written.

    Args:
        path: file or folder.
        record: of `read_record(path)`.
        names: the part of `record.checksums` to compare, where several processes share the work.
    """
    for name, expected in (record.checksums if names is None else names).items():
        file = path / name if name else path
        try:
            found = checksum_of(file) if name else _checksum_before_comment(file)
        except (OSError, zipfile.BadZipFile) as error:
            return f"{file} cannot be read ({error})"
        if found != expected:
            return f"{file} has other bytes than were written"
    return None


def _checksum_before_comment(file: Path) -> int | None:
    """CRC-32 of what `torch.save` has written; None where the comment's length is not the one that is said there."""
    with zipfile.ZipFile(file) as archive:
        length = len(archive.comment)
    with file.open("rb") as opened:
        opened.seek(-length - 2, 2)
        if int.from_bytes(opened.read(2), "little") != length:
            return None
    return zlib.crc32(b"\0\0", checksum_of(file, file.stat().st_size - length - 2))
