"""Checkpoints behind addresses (s3://...): put there from a folder of this host, listed, deleted and fetched.

A file is whole when it is there. A folder is whole when every file that its `record.json` names is there. The record is
put first and deleted last, so that whatever a killed process leaves tells whose it is and what it lacks.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.address import ask, default_cache_dir, is_address, version_of
from lightning_tricks.checkpoints.folder_metadata import SHARDS_METADATA
from lightning_tricks.checkpoints.record import COMMENT_START, RECORD_FILE, Record, damage, parse_record, read_record

_END, _LONGEST_COMMENT = b"PK\x05\x06", 1 << 16  # of a zip archive: 22 bytes that start so, then its comment
_RANGE = 16 << 20  # bytes of one request
_THREADS = 8
_MARKS = (RECORD_FILE, SHARDS_METADATA, "config.json", "latest")  # of a folder that is one checkpoint


def mirror(address: str | Path) -> Path:
    """The path on this host at which what is behind an address is kept."""
    protocol, _, rest = str(address).rstrip("/").partition("://")
    if ".." in rest.split("/"):
        raise UsageError(f"{address}: give an address without '..'")
    return default_cache_dir() / "checkpoints" / protocol / rest.lstrip("/")


@dataclass(frozen=True)
class Stored:
    """A checkpoint behind an address.

    Args:
        files: fsspec's facts about each file, by its name in the folder; of one file, by "".
        record: None where it has none, or none that can be read.
        problem: why it cannot be used, as far as its files' names and its record tell.
    """

    files: Mapping[str, Mapping[str, Any]]
    record: Record | None = None
    problem: str | None = None


class Bucket:
    """The checkpoints behind the address of a folder.

    Args:
        address: such as s3://bucket/run.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._known: dict[str, Stored] = {}

    def look(self) -> dict[str, Stored]:
        """All checkpoints, by name; reads the records of those that were not there at the last look.

        Raises:
            UsageError: see `ask`.
        """
        found: dict[str, dict[str, Any]] = {}
        for inner, info in _list(self.address).items():
            name, _, file = inner.partition("/")
            if name.endswith(".ckpt"):
                found.setdefault(name, {})[file] = info
        known = {name: stored for name, stored in self._known.items() if stored.files == found.get(name)}
        new = [name for name in found if name not in known]
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(lambda name: self._read(name, found[name]), new)
            self._known = known | dict(zip(new, read, strict=True))
        return dict(self._known)

    def _read(self, name: str, files: Mapping[str, Mapping[str, Any]]) -> Stored:
        url = f"{self.address}/{name}"
        try:
            if "" in files:
                end = _part(url, max(0, files[""]["size"] - _LONGEST_COMMENT - 22), files[""]["size"])
                comment = end[end.rfind(_END) + 22 :] if _END in end else b""
                return Stored(files, parse_record(comment.removeprefix(COMMENT_START), url))
            if RECORD_FILE not in files:
                return Stored(files, None, f"incomplete: {url} has no {RECORD_FILE}")
            record = parse_record(_part(f"{url}/{RECORD_FILE}", 0, files[RECORD_FILE]["size"]), url)
        except UsageError as error:
            return Stored(files, None, str(error))
        lacks = next((file for file in record.checksums if file not in files), None) if record else None
        return Stored(files, record, f"incomplete: {url} has no {lacks}" if lacks else None)

    def put(self, path: Path, leads: bool = True) -> None:
        """Put a checkpoint of this host there, but for the files that are there already; an object is whole or not.

        Args:
            path: file or folder, which may have a part of the files, those that this host wrote.
            leads: whether this process puts the record of a folder, too.

        Raises:
            UsageError: another run's checkpoint has that name; see `ask`.
        """
        record, url = read_record(path), f"{self.address}/{path.name}"
        there = _list(url)
        names = [*[RECORD_FILE] * leads, *(record.checksums if record else ())] if path.is_dir() else [""]
        if leads and names[0] in there and self._read(path.name, there).record != record:
            raise UsageError(f"{url}: another checkpoint has this name: two runs save to {self.address}")
        for name in names:
            file = path / name if name else path
            if file.is_file() and there.get(name, {}).get("size") != file.stat().st_size:
                put_file(file, f"{url}/{name}".rstrip("/"))

    def delete(self, name: str, files: Iterable[str]) -> None:
        """Delete a checkpoint, of which the caller says whose it is; a folder is first no longer whole."""
        for file in sorted(files, key=lambda file: file == RECORD_FILE):
            ask(f"{self.address}/{name}/{file}".rstrip("/"), lambda fs, path: fs.rm_file(path), "deleted")

    def check_rights(self) -> None:
        """Put an empty file there and delete it.

        Raises:
            UsageError: see `ask`.
        """
        ask(self.address, lambda fs, path: fs.pipe_file(f"{path}/.lightning_tricks", b""), "written")
        ask(self.address, lambda fs, path: fs.rm_file(f"{path}/.lightning_tricks"), "deleted")


def _list(address: str) -> dict[str, dict[str, Any]]:
    """The files behind an address by their path in it; "" where it is a file; none where nothing is there."""

    def find(fs: Any, path: str) -> dict[str, dict[str, Any]]:
        fs.invalidate_cache()
        found = fs.find(path, detail=True)
        return {name[len(path) :].lstrip("/"): info or fs.info(name) for name, info in found.items()}

    return ask(address, find)


def _part(url: str, start: int, end: int) -> bytes:
    def read(fs: Any, path: str) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=end) if end > start else b""
        if len(data) != end - start:
            raise OSError(f"{len(data)} of {end - start} bytes came")
        return data

    return ask(url, read)


def put_file(file: Path, url: str) -> None:
    """Put one file behind an address; what was there stays until all of the new one is there, in most stores."""

    def put(fs: Any, path: str) -> None:
        fs.put_file(str(file), path)
        if (size := fs.info(path)["size"]) != file.stat().st_size:
            raise OSError(f"{size} of {file.stat().st_size} bytes are there")

    ask(url, put, "written")


# ---- on this host


def local_copy(path: str | Path) -> Path:
    """A path on this host: the path itself, or of what is behind an address, after fetching it; see `fetch`."""
    return fetch(str(path)) if is_address(path) else Path(path)


def fetch(address: str) -> Path:
    """A checkpoint, or another file or folder of weights, from behind an address; compared with its checksums.

    One process of a host fetches, once: the others wait for it, and find it there.

    Raises:
        UsageError: nothing there; a folder of something else; other bytes than were written; see `ask`.
    """
    from lightning_tricks.checkpoints.write_file import remove, swap_in  # which imports a user of this module

    address = address.rstrip("/")
    place, files = mirror(address), _list(address)
    if not files:
        raise UsageError(f"{address}: it is not there; check the path")
    if "" not in files and not any(name in files for name in _MARKS):
        raise UsageError(f"{address} is a folder without a checkpoint: give the checkpoint itself, such as one in it")
    versions = json.dumps(sorted([name, info["size"], version_of(info)] for name, info in files.items()))
    with _alone(default_cache_dir() / "checkpoints" / ".fetched", address) as note:
        if place.exists() and note.read_text() == versions:
            return place
        note.write_text("")
        if (place / "config.json").is_file():
            remove(place)  # of Hugging Face, fetched before: by its place, a copy of what is behind the address
        with swap_in(place) as new:
            _download(address, files, new)
            if found := damage(new, read_record(new)):
                raise UsageError(f"damaged: {found}: take an older checkpoint".replace(str(new), address))
        note.write_text(versions)
    return place


def _download(address: str, files: Mapping[str, Mapping[str, Any]], place: Path) -> None:
    parts = list[tuple[str, int, int]]()
    for name, info in files.items():
        file = place / name
        if ".." in file.parts:
            raise UsageError(f"{address} names {name}, which is outside of the folder: take one that you trust")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.truncate(info["size"])
        step = info["size"] or 1 if address.startswith("http") else _RANGE  # not every such server gives parts
        parts += [(name, at, min(at + step, info["size"])) for at in range(0, info["size"], step)]

    def copy(part: tuple[str, int, int]) -> None:
        name, start, end = part
        data = _part(f"{address}/{name}".rstrip("/"), start, end)
        with (place / name).open("r+b") as opened:
            opened.seek(start)
            opened.write(data)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(copy, parts))


@contextmanager
def _alone(folder: Path, address: str) -> Iterator[Path]:
    """Inside the `with`, no other process of this host fetches from the address; gives a file for a note about it."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / sha256(address.encode()).hexdigest()[:24]
    with note.open("a") as opened:
        if os.name == "posix":
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX)
        yield note
