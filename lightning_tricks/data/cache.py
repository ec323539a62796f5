"""Build a folder once: in a temporary folder beside it, which is then renamed.

A reader sees the whole folder or none, even if several processes build it at once or one is killed.
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
    """Fill `folder` by calling `build` with a temporary folder beside it, unless `folder` exists.

    Raises:
        UsageError: the parent cannot be written, or the disk is full. No incomplete folder is left.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)  # mkdtemp's 0o700 would lock others out of a shared cache
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():
            return  # another process was faster, and its folder is as good
        reason = error.strerror or error
        raise UsageError(f"cache_dir: cannot write to {folder.parent} ({reason}); set cache_dir") from error


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of killed builds of `folder`, once they are too old to be still in use."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        newest = max((path.stat().st_mtime for path in (left, *left.glob("*"))), default=0.0)
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
