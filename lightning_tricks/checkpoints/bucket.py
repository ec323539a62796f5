"""Checkpoints behind addresses (s3://...): put there from a folder of this host, listed, deleted and fetched.

A file is whole when it is there, a folder when every file that its `record.json` names is there. The record is put
first and deleted last, so that whatever a killed process leaves tells whose it is and what it lacks.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.address import ask, default_cache_dir, is_address, read_part, version_of
from lightning_tricks.checkpoints.folder_metadata import SHARDS_METADATA
from lightning_tricks.checkpoints.record import COMMENT_START, RECORD_FILE, Record, damage, parse_record, read_record

_END, _END_BYTES = b"PK\x05\x06", 22 + (1 << 16)  # of a zip archive: 22 bytes that start so, then its comment
_RANGE = 16 << 20  # bytes of one request
_THREADS = 8
_MARKS = (RECORD_FILE, SHARDS_METADATA, "config.json", "latest")  # of a folder that is one checkpoint
Files = Mapping[str, Mapping[str, Any]]  # fsspec's facts by the name in the folder; of one file, by ""


def _mirrors() -> Path:
    return default_cache_dir() / "checkpoints"


def mirror(address: str | Path) -> Path:
    """The path on this host at which a copy of what is behind an address is kept."""
    protocol, _, rest = str(address).rstrip("/").partition("://")
    if ".." in rest.split("/"):
        raise UsageError(f"{address}: give an address without '..'")
    return _mirrors() / protocol / rest.lstrip("/")


def is_mirror(path: Path) -> bool:
    """Whether a path is one of those: each host may have its own."""
    return path.is_relative_to(_mirrors())


class Stored(NamedTuple):
    """A checkpoint behind an address."""

    files: Files
    record: Record | None = None
    is_part: bool = False  # of a killed upload or deletion
    problem: str | None = None  # of its record


class Bucket:
    """The checkpoints behind the address of a folder, such as s3://bucket/run. Errors are those of `ask`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._known: dict[str, Stored] = {}

    def look(self) -> dict[str, Stored]:
        """All checkpoints, by name; reads the records of those that were not there at the last look."""
        found: dict[str, dict[str, Any]] = {}
        for inner, info in _list(self.address).items():
            name, _, file = inner.partition("/")
            if name.endswith(".ckpt"):
                found.setdefault(name, {})[file] = info
        # a record that could not be read, as in an outage, is read again
        known = {name: one for name, one in self._known.items() if one.files == found.get(name) and not one.problem}
        new = found.keys() - known.keys()
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(lambda name: self._read(name, found[name]), new)
            self._known = known | dict(zip(new, read, strict=True))
        return dict(self._known)

    def _read(self, name: str, files: Files) -> Stored:
        url = f"{self.address}/{name}"
        try:
            if "" in files:
                size = files[""]["size"]
                end = read_part(url, max(0, size - _END_BYTES), size).rpartition(_END)[2]
                return Stored(files, parse_record(end.partition(COMMENT_START)[2], url))
            if RECORD_FILE not in files:
                return Stored(files)  # of another program
            record = parse_record(read_part(f"{url}/{RECORD_FILE}", 0, files[RECORD_FILE]["size"]), url)
        except UsageError as error:
            return Stored(files, problem=str(error))
        return Stored(files, record, is_part=bool(record and record.checksums.keys() - files.keys()))

    def put(self, path: Path, leads: bool = True) -> None:
        """Put a checkpoint of this host there, but for files that are there already.

        Args:
            path: file or folder, which may have a part of the files, those that this host wrote.
            leads: whether this process puts the record of a folder, too.

        Raises:
            UsageError: another checkpoint has that name.
        """
        record, url = read_record(path), f"{self.address}/{path.name}"
        there = _list(url)
        names = [*[RECORD_FILE] * leads, *(record.checksums if record else ())] if path.is_dir() else [""]
        if leads and names[0] in there and self._read(path.name, there).record != record:
            raise UsageError(f"{url}: another checkpoint has this name: two runs save to {self.address}")
        for name in names:
            file = path / name
            if file.is_file() and there.get(name, {}).get("size") != file.stat().st_size:
                put_file(file, f"{url}/{name}".rstrip("/"))

    def delete(self, name: str, files: Iterable[str]) -> None:
        """Delete a checkpoint, of which the caller says whose it is; a folder is first no longer whole."""
        for file in sorted(files, key=lambda file: file == RECORD_FILE):
            ask(f"{self.address}/{name}/{file}".rstrip("/"), lambda fs, path: fs.rm_file(path), "deleted")

    def check_rights(self) -> None:
        """Put an empty file there and delete it."""
        ask(self.address, lambda fs, path: fs.pipe_file(f"{path}/.lightning_tricks", b""), "written")
        ask(self.address, lambda fs, path: fs.rm_file(f"{path}/.lightning_tricks"), "deleted")


def _list(address: str) -> dict[str, dict[str, Any]]:
    """The files behind an address, see `Files`; none where nothing is there."""

    def find(fs: Any, path: str) -> dict[str, dict[str, Any]]:
        fs.invalidate_cache()
        found = fs.find(path, detail=True)
        return {name[len(path) :].lstrip("/"): info or fs.info(name) for name, info in found.items()}

    return ask(address, find)


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
        remedy = "no address has a last.ckpt: take a step=N.ckpt" if place.name == "last.ckpt" else "check the path"
        raise UsageError(f"{address}: it is not there; {remedy}")
    if "" not in files and not any(name in files for name in _MARKS):
        raise UsageError(f"{address} is a folder without a checkpoint: give the checkpoint itself, such as one in it")
    versions = json.dumps(sorted([name, info["size"], version_of(info)] for name, info in files.items()))
    with _alone(address) as note:
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


def _download(address: str, files: Files, place: Path) -> None:
    parts = list[tuple[str, int, int]]()
    for name, info in files.items():
        file, size = place / name, info["size"]
        if ".." in file.parts:
            raise UsageError(f"{address} names {name}, which is outside of the folder: take one that you trust")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        step = size or 1 if address.startswith("http") else _RANGE  # not every such server gives parts
        parts += [(name, start, min(start + step, size)) for start in range(0, size, step)]

    def copy(part: tuple[str, int, int]) -> None:
        name, start, end = part
        data = read_part(f"{address}/{name}".rstrip("/"), start, end)
        with (place / name).open("r+b") as opened:
            opened.seek(start)
            opened.write(data)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(copy, parts))


@contextmanager
def _alone(address: str) -> Iterator[Path]:
    """Inside the `with`, no other process of this host fetches from the address; gives a file for a note about it."""
    note = _mirrors() / ".fetched" / sha256(address.encode()).hexdigest()[:24]
    note.parent.mkdir(parents=True, exist_ok=True)
    with note.open("a") as opened:
        if os.name == "posix":
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX)
        yield note
