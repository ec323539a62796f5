"""Files behind URLs such as s3://, gs:// and hf://, through fsspec, read by blocks that a folder of this host keeps."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import has_magic

from lightning_tricks._host.address import ask, read_part, version_of

BLOCK_BYTES = 1 << 20  # a row at a drawn place needs a few KB, and a larger block fetches more that may never be read
Result = TypeVar("Result")


def file_size(file: "Path | RemoteFile") -> int:
    """In bytes, as it is stored."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def each(function: Callable[..., Result], files: Sequence[Any], *more: Iterable[Any]) -> list[Result]:
    """`map` over files, in threads where they are remote: a bucket is mostly waited for."""
    if not (files and isinstance(files[0], RemoteFile)):
        return list(map(function, files, *more))
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, files, *more))


@dataclass(eq=False)
class BlockCache:
    """Blocks of remote files in a folder, for any number of processes; the least recently read are dropped.

    Args:
        folder: made at the first block. Its files with `.block` in their names are the cache's own.
        limit_gib: bound of its size, which P processes that all fetch may exceed by P / 128 of it.
    """

    folder: Path
    limit_gib: float
    _unchecked: float = float("inf")  # bytes written since the size was last looked at

    def read(self, name: str, start: int, count: int) -> bytes | None:
        """Bytes start..start+count-1 of a block; None if it is not here."""
        with suppress(OSError), (self.folder / name).open("rb", buffering=0) as file:
            file.seek(start)
            if len(found := file.read(count)) == count:
                with suppress(OSError):  # of another user's block
                    os.utime(file.fileno())
                return found
        return None

    def write(self, name: str, data: bytes) -> None:
        """Keep a block; where the disk is full or cannot be written, it is fetched again when it is needed."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=f"{name}.", dir=self.folder) as file:
                file.write(data)
                file.flush()
                os.replace(file.name, self.folder / name)  # the end finds no temporary file, which is suppressed too
        self._unchecked += len(data)
        if self._unchecked > self.limit_gib * 2**30 / 128:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        blocks = list[tuple[float, int, str]]()
        for file in self.folder.glob("*.block*"):
            with suppress(OSError):  # another process has dropped it
                blocks.append(((stat := file.stat()).st_mtime, stat.st_size, str(file)))
        excess = sum(size for _, size, _ in blocks) - self.limit_gib * 2**30 * 15 / 16
        for _, size, path in sorted(blocks):
            if excess > 0:
                excess -= size
                with suppress(OSError):  # a block of this cache, by its folder and name; who has it open reads on
                    os.unlink(path)
        self._unchecked = 0


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL; `version` is its ETag or the like, so that no block of a replaced file is taken for its."""

    url: str
    size: int
    version: str
    cache: BlockCache = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> str:
        """The URL of its folder."""
        return self.url.rpartition("/")[0]

    def __str__(self) -> str:
        return self.url

    def head(self, start: int, count: int) -> bytes:
        """Bytes start..start+count-1, fewer where the file ends; past the cache, for a look at many files."""
        return read_part(self.url, start, min(start + count, self.size))

    def read(self, start: int, count: int) -> bytes:
        """The same through the cache."""
        stop, parts = min(start + count, self.size), list[bytes]()
        key = sha256(f"{self.url} {self.version} {self.size}".encode()).hexdigest()[:24]
        while start < stop:
            block, low = divmod(start, BLOCK_BYTES)
            high = min(low + stop - start, BLOCK_BYTES)
            name = f"{key}-{block}.block"
            if (part := self.cache.read(name, low, high - low)) is None:
                whole = self.head(block * BLOCK_BYTES, BLOCK_BYTES)
                self.cache.write(name, whole)
                part = whole[low:high]
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def beside(self, name: str) -> "RemoteFile | None":
        """Another file of its folder, which is listed once; None if it is not there."""
        folder, _, last = f"{self.parent}/{name}".rpartition("/")
        return _listed(folder, self.cache).get(last)


def find_remote(url: str, cache: BlockCache, of_folder: Callable[[list[Any]], list[Any]]) -> list[RemoteFile]:
    """The files of a URL as they are now, by name: that file, those of a glob, or what `of_folder` takes of a folder's.

    Raises:
        UsageError: it is not there, the bucket refuses, the library of its protocol is missing.
    """
    _listed.cache_clear()
    ask(url, lambda fs, path: fs.invalidate_cache())
    return _find(url, cache, of_folder)


@lru_cache(maxsize=16)
def _listed(folder: str, cache: BlockCache) -> dict[str, RemoteFile]:
    return {file.name: file for file in _find(folder, cache, list)}


def _find(url: str, cache: BlockCache, of_folder: Callable[[list[Any]], list[Any]]) -> list[RemoteFile]:
    def files(fs: Any, path: str) -> list[RemoteFile]:
        infos = list(fs.glob(path, detail=True).values()) if has_magic(path) else [fs.info(path)]
        if is_folder := not has_magic(path) and infos[0]["type"] == "directory":
            infos = fs.ls(path, detail=True)
        found = list[RemoteFile]()
        for info in sorted(infos, key=lambda info: str(info["name"])):
            if info["type"] == "file":
                url = fs.unstrip_protocol(info["name"])
                found.append(RemoteFile(url, int(info["size"]), version_of(info), cache))
        return of_folder(found) if is_folder else found

    return ask(url, files)
