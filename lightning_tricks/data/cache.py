"""Make a folder once, or not at all: built aside, then renamed into place.

A reader sees the whole folder or none, whoever builds it, how many build it at once, and wherever they are killed.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lightning_tricks._errors import UsageError

_ABANDONED_SECONDS = 24 * 3600


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/lightning_tricks`, else `~/.cache/lightning_tricks`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_tricks"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill `folder` by calling `build` with a temporary folder beside it, unless `folder` is there.

    Args:
        folder: where the result goes; its parent is made if need be.
        build: writes everything into the folder that it is given.

    Raises:
        UsageError: the parent cannot be written, or the disk is full. Nothing half-written is left.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            build(aside)
            aside.chmod(0o755)  # mkdtemp's 0o700 would lock others out of a shared cache
            _publish(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cache_dir: cannot write to {folder.parent} ({reason}); set cache_dir") from error


def _publish(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        # somebody else was faster: theirs is as good as ours
        if not folder.is_dir():
            raise


def _sweep(folder: Path) -> None:
    """Remove what a killed build of the same folder has left, once it is old enough to be nobody's."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        newest = max((path.stat().st_mtime for path in (left, *left.glob("*"))), default=0.0)
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
