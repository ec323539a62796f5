"""A text by its content: the hash of each file, the revision of each dataset, and a record of them in the cache.

A file whose path, size and times are those of the record is not read again; one that was touched or copied is read once
more, and has the same hash. The record only saves work: without it, or where it cannot be written, all is asked anew.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.process import has_ended, process_tag
from lightning_tricks.accounting.device_speed import available_cores

RECORD = "known_content.json"  # in the cache's folder


def staging_prefix(name: str) -> str:
    """The first part of the name under which `name` is written: it tells the process, see `remove_unfinished`."""
    tag = process_tag()
    return f".{name}." if tag is None else f".{name}.{tag}."


def remove_unfinished(cache_dir: Path) -> None:
    """Remove what processes that have ended were writing into a cache: their own names in it tell that."""
    for left in cache_dir.glob(".*"):
        if has_ended(left.name):
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill `folder` by calling `build` with a temporary folder beside it, unless `folder` exists.

    What killed builds of any folder beside it have left is removed.

    Raises:
        UsageError: the parent cannot be written, or the disk is full. No incomplete folder is left.
    """
    remove_unfinished(folder.parent)
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=staging_prefix(folder.name), dir=folder.parent))
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


_HASHED_AT_ONCE = 256  # files, after which their hashes are recorded: of a killed start little is read again


def file_hashes(paths: Sequence[Path], cache_dir: Path) -> list[str]:
    """The SHA-256 of each file.

    Raises:
        UsageError: a file cannot be read.
    """
    hashes = list[str]()
    with ThreadPoolExecutor(available_cores()) as pool:
        for batch in (paths[start : start + _HASHED_AT_ONCE] for start in range(0, len(paths), _HASHED_AT_ONCE)):
            known = _read(cache_dir, "files")
            keys = [os.path.abspath(path) for path in batch]
            entries = list(pool.map(_entry, batch, [known.get(key) for key in keys]))
            hashes += [str(entry[-1]) for entry in entries]
            _add(cache_dir, "files", {k: e for k, e in zip(keys, entries, strict=True) if e != known.get(k)})
    return hashes


def _entry(path: Path, known: Any) -> list[Any]:
    """A file's size and times with its hash; it is read only where size and times are not the known ones."""
    try:
        stat = path.stat()  # before the content: what changes meanwhile is read again the next time
        marks = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        if isinstance(known, list) and known[:-1] == marks:
            return known
        with path.open("rb") as file:
            return [*marks, hashlib.file_digest(file, "sha256").hexdigest()]
    except OSError as error:
        raise UsageError(f"files: {path} cannot be read ({error.strerror or error})") from error


def known_revision(name: str, cache_dir: Path, recorded: bool) -> str:
    """The commit of a dataset of the Hugging Face Hub; the recorded one, with a line, where the Hub does not answer.

    Args:
        name: `owner/dataset`.
        cache_dir: folder of the record.
        recorded: do not ask the Hub if there is a record: another process of the run has just asked.

    Raises:
        UsageError: the Hub does not answer, and no revision is recorded.
    """
    known = _read(cache_dir, "datasets").get(name)
    if recorded and isinstance(known, str):
        return known
    try:
        import huggingface_hub

        revision = str(huggingface_hub.HfApi().dataset_info(name, timeout=30).sha)
    except Exception as error:  # the Hub and the network each raise their own
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if not isinstance(known, str):
            raise UsageError(f"hf_dataset={name!r}: cannot be read ({reason})") from error
        line = f"hf_dataset={name!r}: the Hub does not answer ({reason}); its last known revision {known} is used"
        print(line, file=sys.stderr, flush=True)
        return known
    if revision != known:
        _add(cache_dir, "datasets", {name: revision})
    return revision


def _read(cache_dir: Path, part: str) -> dict[str, Any]:
    """A part of the record; empty where it cannot be read."""
    try:
        found = json.loads((cache_dir / RECORD).read_text(encoding="utf-8"))[part]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _add(cache_dir: Path, part: str, new: dict[str, Any]) -> None:
    """Add to the record in one rename. What another process adds at the same moment may be lost, and is asked again."""
    if not new or not cache_dir.is_dir():  # `check`, which leaves nothing behind, asks before there is a cache
        return
    record = {name: _read(cache_dir, name) for name in ("files", "datasets")}
    record[part] |= new
    with suppress(OSError):  # a cache that is only read
        descriptor, temporary = tempfile.mkstemp(prefix=staging_prefix(RECORD), dir=cache_dir)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.chmod(temporary, 0o644)  # mkstemp's 0o600 would lock others out of a shared cache
            os.replace(temporary, cache_dir / RECORD)
        except OSError:
            os.unlink(temporary)  # written three lines above
            raise
