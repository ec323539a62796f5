"""Refuse a place that cannot be written before a command has worked for it."""

import tempfile
from pathlib import Path

from lightning_tricks._errors import UsageError


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder, there or not, in which no file could be made: a file, one without rights, on a full disk."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{option}={folder}: {there} is a file: name another folder, or rename the file")
    if reason := _refusal(there):
        raise UsageError(f"{option}={folder}: cannot be written ({reason}): make room, or name another folder")


def check_file(option: str, file: str | Path) -> None:
    """Refuse the path of a file that could not be written: a folder, or one in no folder or one as above."""
    path = Path(file)
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{option}={file}: this is a folder: name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{option}={file}: there is no such folder: make it, or name another file")
    if reason := _refusal(folder):
        raise UsageError(f"{option}={file}: cannot be written ({reason}): make room, or name another file")


def _refusal(folder: Path) -> str | None:
    """Why no file can be made in a folder; None where one can. A permission bit alone does not tell of a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None
