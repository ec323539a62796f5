"""Addresses such as s3://bucket/run: ask what is behind them, through fsspec, again where the connection drops."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from lightning_tricks._core.errors import PIP_EXTRA, UsageError

WAITS_SECONDS = (0.5, 1, 2, 4, 8)  # before each further try
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"}  # of this package, by protocol
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "created")
Result = TypeVar("Result")


def is_address(place: Any) -> bool:
    """Whether a place is behind an address, and not a path of a file system of this host."""
    return "://" in str(place)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/lightning_tricks`, else `~/.cache/lightning_tricks`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_tricks"


def version_of(info: dict[str, Any]) -> str:
    """What changes when a file behind an address is replaced, of fsspec's facts about it."""
    return str(next((info[key] for key in VERSION_KEYS if info.get(key)), ""))


def ask(url: str, question: Callable[[Any, str], Result], done: str = "read") -> Result:
    """Ask the filesystem of an address, and again where the connection drops.

    Args:
        url: the address.
        question: is given the filesystem and its path.
        done: what was not done, for the message, such as `read` or `written`.

    Raises:
        UsageError: names the address and the reason.
    """
    for wait in (*WAITS_SECONDS, None):
        try:
            return question(*url_to_fs(url))  # the filesystem of this process: one from before a fork is not used
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(url.partition(":")[0])
            remedy = PIP_EXTRA.format(extra) if extra else "check the URL"
            raise UsageError(f"{url}: {error}; {remedy}") from None
        except FileNotFoundError as error:
            bucket = " (no such bucket)" if "bucket does not exist" in str(error) else ""
            raise UsageError(f"{url}: it is not there{bucket}; check the path") from None
        except Exception as error:  # of a connection: each library has its own class
            if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
                raise UsageError(f"{url}: access is refused ({error}); check the credentials and the path") from None
            if wait is None:
                tries, reason = len(WAITS_SECONDS) + 1, " ".join(f"{type(error).__name__}: {error}".split())
                raise UsageError(
                    f"{url}: not {done} in {tries} tries ({reason}); go on when it answers again"
                ) from error
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def read_part(url: str, start: int, end: int) -> bytes:
    """Bytes start..end-1 of a file behind an address; see `ask`."""

    def read(fs: Any, path: str) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{len(data)} of {end - start} bytes came")
        return data

    return ask(url, read) if end > start else b""
