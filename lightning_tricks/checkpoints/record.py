"""The record of a checkpoint: its step, its place in the order of saves, its checksums; read without opening a tensor.

In a file it is the comment of the zip archive that `torch.save` writes, in a folder of shards `record.json`. Other
programs do not see it: torch and Lightning open the file as any other.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.archive import DAMAGED_ARCHIVE, archive_damage, write_archive

KEY = "lightning_tricks"  # in a checkpoint: a dict, of which the entry "record" is a Record's content
RECORD_FILE = "record.json"  # in a folder of shards, written last
VERSION = 2  # of the record and of what KEY holds; raised when an older version could not read it: 2 names the run
_START = b"lightning_tricks "  # of the comment
_BLOCK = 1 << 22  # bytes read at once


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
        checksums: CRC-32 of each file, by its name in the folder; of one file, by the name "", what `write_archive`
            gives.
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
    try:
        text = (path / RECORD_FILE).read_bytes() if path.is_dir() else _comment(path)
    except (*DAMAGED_ARCHIVE, OSError):
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


def save_with_record(checkpoint: Mapping[str, Any], path: Path) -> None:
    """`torch.save` to a new file, as a stream, with the record behind it; when it returns, the disk has all of it.

    Raises:
        OSError: what the file system says, such as a full disk.
    """
    with path.open("wb") as file:
        record = replace(record_of(checkpoint), checksums={"": write_archive(checkpoint, file)})
        comment = _START + to_json(record)
        file.seek(-2, 1)  # over the length of the comment, which torch has set to 0
        file.write(len(comment).to_bytes(2, "little") + comment)
        file.flush()
        os.fsync(file.fileno())


def checksum_of(file: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


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
            found = _file_damage(file, expected) if name else _archive_damage(file, expected)
        except (*DAMAGED_ARCHIVE, OSError) as error:
            return f"{file} cannot be read ({error})"
        if found:
            return found
    return None


def _file_damage(file: Path, checksum: int) -> str | None:
    return None if checksum_of(file) == checksum else f"{file} has other bytes than were written"


def _archive_damage(file: Path, checksum: int) -> str | None:
    """`archive_damage`, and a check that the comment is as long as the archive says."""
    with zipfile.ZipFile(file) as archive:
        length = len(archive.comment)
    with file.open("rb") as opened:
        opened.seek(-length - 2, 2)
        if int.from_bytes(opened.read(2), "little") != length:
            return f"{file} has other bytes at its end than were written"
    return archive_damage(file, checksum)
