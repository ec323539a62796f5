"""Check every byte of a checkpoint against the checksums saved with it, before anything in it is unpickled."""

import zipfile
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.archive import DAMAGED_ARCHIVE
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.record import damage, read_record

_END = b"PK\x05\x06"  # of a zip archive: 22 bytes, the last two of them the length of the comment that follows


def verify_checkpoint(path: str | Path, resumes: bool = False) -> Path:
    """Refuse a path that is no whole checkpoint, or whose bytes have changed; unpickles nothing of a file.

    A checkpoint of this collection, file or folder, is compared with its record. In a file of `torch.save` alone, the
    archive's own checksum of each tensor is compared. A folder of shards without a record, and a file of torch before
    version 1.6, have no checksums: they are checked as by `check_checkpoint`.

    Args:
        path: see `check_checkpoint`.
        resumes: see `check_checkpoint`.

    Returns:
        The path.

    Raises:
        UsageError: what `check_checkpoint` raises; other bytes than were written; a checkpoint of a newer version.
    """
    checked = check_checkpoint(path, resumes)
    if "://" not in str(path):
        check_bytes(checked)
    return checked


def check_bytes(path: Path) -> None:
    """The second half of `verify_checkpoint`, for a path that `check_checkpoint` has passed.

    Raises:
        UsageError: other bytes than were written; a checkpoint of a newer version.
    """
    while True:
        before = path.stat()
        found = _damage(path)
        after = path.stat()
        if not found or (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
            break  # otherwise a newer checkpoint has taken the name while this one was read
    if found:
        raise UsageError(f"damaged: {found}: take an older checkpoint")


def _damage(path: Path) -> str | None:
    record = read_record(path)
    if record is not None:
        return damage(path, record)
    return _damage_without_record(path) if path.is_file() and zipfile.is_zipfile(path) else None


def _damage_without_record(file: Path) -> str | None:
    """Why an archive without our record is not as `torch.save` wrote it, as a clause."""
    with file.open("rb") as opened:
        opened.seek(-22, 2)
        end = opened.read()
        if end[:4] != _END or end[-2:] != b"\0\0":  # torch writes no comment, so there was a record
            return f"{file} has a damaged record"
    try:
        with zipfile.ZipFile(file) as archive:
            entry = archive.testzip()
    except (*DAMAGED_ARCHIVE, OSError) as error:
        return f"{file} cannot be read ({error})"
    return f"{file} has other bytes in {entry} than were written" if entry else None
