"""Refuse a place that cannot be written before a command has worked for it."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder, there or not, in which no file could be made: a file, one without rights, on a full disk."""
    _refuse_address(option, folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{option}={folder}: {there} is a file: name another folder, or rename the file")
    if reason := _refusal(there):
        raise UsageError(f"{option}={folder}: cannot be written ({reason}): make room, or name another folder")


def check_folders_of_run(loggers: Iterable[Any], savers: Sequence[Any], default_root_dir: str | Path) -> None:
    """Refuse folders that a run could not write its logs and checkpoints to; places in buckets are not asked.

    Raises:
        UsageError: names the option and the folder.
    """
    places = [("trainer.logger: save_dir", logger.save_dir) for logger in loggers]
    without_loggers = not places
    places += [  # SafeCheckpoint checks the folder of this host for an address
        ("ModelCheckpoint.dirpath", getattr(saver, "address", None) or getattr(saver, "dirpath", None))
        for saver in savers
    ]
    if savers and without_loggers:
        places.append(("trainer.default_root_dir", default_root_dir))
    for option, folder in places:
        if folder and "://" not in str(folder):
            check_folder(option, Path(folder))


def free_bytes(folder: str | Path) -> int | None:
    """Free bytes of the disk of a folder, there or not yet; None for a bucket."""
    if "://" in str(folder):
        return None
    path = Path(folder)
    return shutil.disk_usage(next(one for one in (path, *path.absolute().parents) if one.exists())).free


def check_file(option: str, file: str | Path) -> None:
    """Refuse the path of a file that could not be written: a folder, or one in no folder or one as above."""
    path = Path(file)
    _refuse_address(option, path)
    if str(file) == "-":
        raise UsageError(f"{option}=-: it is not written to standard output: name a file")
    folder = path.absolute().parent
    if path.is_symlink() and not str(path.absolute()).startswith("/dev/"):  # /dev/stdout is one
        raise UsageError(
            f"{option}={file}: this is a link to {os.path.realpath(path)}: name the file itself, or another"
        )
    if path.is_dir():
        raise UsageError(f"{option}={file}: this is a folder: name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{option}={file}: there is no such folder: make it, or name another file")
    if path.exists() and not os.access(path, os.W_OK):
        reason: str | None = os.strerror(errno.EACCES)
    else:  # a device, such as /dev/stdout, needs no new file in its folder
        reason = None if path.exists() and not path.is_file() else _refusal(folder)
    if reason:
        raise UsageError(f"{option}={file}: cannot be written ({reason}): make room, or name another file")


def _refuse_address(option: str, path: Path) -> None:
    """Refuse an address, which would be the path of a folder `s3:` here; a Path has one slash after its colon."""
    if re.match(r"\w{2,}:(/|$)", str(path)):
        raise UsageError(f"{option}={path}: this is an address: name a path on this host, and copy the result there")


def _refusal(folder: Path) -> str | None:
    """Why no file can be made in a folder; None where one can. A permission bit alone does not tell of a full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None
