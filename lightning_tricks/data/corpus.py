"""Sources of text: the standard library, files, or a Hugging Face dataset, each as a stream of documents.

Files are read whole, in pieces, or row by row. Every error names its file.
"""

import glob
import gzip
import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data.content import file_hashes, known_revision

# the files of a folder that are read; a glob takes any name
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson", ".parquet")


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _suffix(path: Path) -> str:
    """The ending that tells the kind, in small letters and without `.gz`; that of .ndjson is .jsonl, its other name."""
    suffix = (Path(path.stem) if _is_gzip(path) else path).suffix.lower()
    return ".jsonl" if suffix == ".ndjson" else suffix


def is_rows(path: Path) -> bool:
    """Whether a row of the file is a document."""
    return _suffix(path) in (".jsonl", ".parquet")


def check_readers(paths: list[Path]) -> None:
    """Refuse a Parquet file where its library is missing."""
    parquet = next((path for path in paths if _suffix(path) == ".parquet"), None)
    if parquet is not None and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f'files: {parquet} needs: pip install "lightning-tricks[parquet]"')


def expand(patterns: list[str]) -> list[Path]:
    """The files of paths, folders and globs: sorted, each once.

    Raises:
        UsageError: a pattern matches nothing, or a file that was named itself is empty.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        try:
            files = {p.resolve() for p in _matches(path) if p.is_file() and p.stat().st_size}
        except OSError as error:
            why = f"{error.filename or path} cannot be read ({error.strerror or error})"
            raise UsageError(f"files={pattern!r}: {why}; leave it out or change rights") from error
        if not files:
            kinds = f" ending in {' '.join(TEXT_SUFFIXES)}" if path.is_dir() else ""
            raise UsageError(f"files: {pattern!r} matches no file with text in it{kinds}; check the path")
        found |= files
    return sorted(found)


def _matches(path: Path) -> Iterator[Path]:
    """The files of one pattern; raises OSError for a folder that cannot be read."""
    if path.is_dir():
        for folder, folders, names in os.walk(path, onerror=_raise):
            folders[:] = [name for name in folders if _is_visible(name)]
            paths = (Path(folder, name) for name in names if _is_visible(name))
            yield from (path for path in paths if _suffix(path) in TEXT_SUFFIXES)
    elif path.exists():
        if path.stat().st_size == 0:
            raise UsageError(f"files: {path} is empty; remove it from the list or fill it")
        yield path
    else:
        yield from map(Path, glob.glob(str(path), recursive=True))


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _lines(path: Path, limit: int = -1) -> Iterator[str]:
    """The lines of a text file, gzipped or not; with `limit`, in parts of at most so many characters."""
    open_text: Callable[..., TextIO] = gzip.open if _is_gzip(path) else Path.open
    try:
        # newline="" keeps the line ends; a byte order mark is no text
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            while line := file.readline(limit):
                if "\0" in line:
                    raise UsageError(f"files: {path} is no UTF-8 text (it has zero bytes); convert it or leave it out")
                yield line
    except UnicodeDecodeError as error:
        raise UsageError(f"files: {path} is not UTF-8 text ({error.reason}); convert it or leave it out") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"files: {path} cannot be read ({reason})") from error


def read_pieces(path: Path, size: int) -> Iterator[str]:
    """The file in pieces of about `size` characters; joined, they are the file.

    A piece ends after a blank line, or if none comes within twice the size, at a line's end or within a long line.
    """
    piece: list[str] = []
    length, starts_line = 0, True
    for part in _lines(path, limit=size):  # a line, or a part of a line that is longer than the size
        piece.append(part)
        length += len(part)
        blank = starts_line and not part.strip()
        starts_line = part[-1] in "\r\n"
        if length >= 2 * size or (length >= size and blank):
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def read_rows(path: Path, text_field: str) -> Iterator[str]:
    """The text of each row of a .jsonl or .parquet file."""
    return _read_parquet(path, text_field) if _suffix(path) == ".parquet" else _read_jsonl(path, text_field)


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"files: {path}, line {number} is not JSON ({error})") from error
        if not isinstance(row, dict) or text_field not in row:
            keys = _names(row) if isinstance(row, dict) else type(row).__name__
            raise UsageError(f"text_field={text_field!r}: {path}, line {number} has {keys}; name the key of its text")
        if row[text_field] is not None:  # a row may have no text
            yield _characters(_checked(row[text_field], text_field, f"{path}, line {number}"))


def _checked(text: object, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise UsageError(
            f"text_field={text_field!r}: {where} has {str(text)[:40]} there and no text: name that of texts"
        )
    return text


def _characters(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can contain and which are no characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _names(names: Iterable[object]) -> str:
    """The first names of keys or columns, in one line of a readable length."""
    text = ", ".join(str(name) for name in islice(names, 20))
    text = "".join(char if char.isprintable() else "?" for char in text)
    return "no keys" if not text else text if len(text) <= 200 else f"{text[:200]}..."


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in (names := file.schema_arrow.names):
                raise UsageError(f"text_field={text_field!r}: {path} has {_names(names)}; name the column of its text")
            for rows in file.iter_batches(columns=[text_field]):
                yield from (
                    _checked(text, text_field, str(path)) for text in rows.column(text_field).to_pylist() if text
                )
    except UsageError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:  # ValueError: strings that are not UTF-8
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"files: {path} cannot be read as Parquet ({reason})") from error


Located = Callable[[], Iterator[tuple[Path | None, str]]]
_MANY_FILES = 100
_LARGEST_DOCUMENT = 4 << 20  # characters that are encoded at once


@dataclass(frozen=True)
class Corpus:
    """Documents, and their description before they are read. It can be pickled, so the data module that holds it can.

    Args:
        description: one line for the record in meta.json.
        identity: called with the cache's folder, and whether what is recorded there suffices in place of a question to
            another host. Its answer depends on the content of the documents; part of the cache's key.
        n_bytes: approximate size of the text, for the progress bar; None when unknown.
        located: called for each pass, yields the non-empty documents in a fixed order, each as (file, text); the file
            is None where they come from none.
    """

    description: str
    identity: Callable[[Path, bool], str]
    n_bytes: int | None
    located: Located

    def documents(self) -> Iterator[str]:
        """The texts alone, in the same order."""
        return (text for _, text in self.located())


def _corpus_of_files(description: str, paths: list[Path], setting: str, located: Located) -> Corpus:
    """A corpus whose identity changes with `setting`, and with the content of the files in their order."""
    size = sum(path.stat().st_size for path in paths)
    identity = partial(_identity_of_files, paths, setting)
    return Corpus(description, identity, size, located)


def _identity_of_files(paths: list[Path], setting: str, cache_dir: Path, recorded: bool = False) -> str:
    """Depends on what is read from the files: their content, and the reader that their names choose."""
    kinds = [(_suffix(path) if is_rows(path) else "plain", _is_gzip(path)) for path in paths]
    content = list(zip(kinds, file_hashes(paths, cache_dir), strict=True))
    return hashlib.sha256(repr((setting, content)).encode()).hexdigest()


def standard_library() -> Corpus:
    """The Python sources of the standard library, without its tests and the packages installed beside it.

    Every machine with Python has these 11 to 12 MB; each file is a document. They vary with the Python version, so
    compare figures only between runs whose recorded hash is the same.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    sources: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = sorted(path for path in sources if path.is_file())  # not a link to nothing
    if not paths:
        raise UsageError(f"files: no standard library sources under {root}; give text files of your own")

    version = platform.python_version()
    return _corpus_of_files(f"the standard library of Python {version}", paths, version, partial(_sources, paths))


def _sources(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    seen = set()
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"files: {path} cannot be read ({error.strerror or error})") from error
        if text.strip() and text not in seen:
            seen.add(text)
            yield path, text


def text_files(patterns: list[str], text_field: str, whole: bool = False) -> Corpus:
    """Files, folders and globs.

    Each row of a .jsonl or .parquet file is a document. Any other file is plain UTF-8 text: if there are 100 or more,
    each is a document. If there are fewer, each is cut after blank lines into documents of about a two hundredth of
    the file (2 to 64 KiB), so that one big file has a validation part too. An added file leaves the documents of the
    others as they are, unless it is the hundredth.

    Args:
        patterns: paths, folders and globs.
        text_field: the key or column that holds the text of a row.
        whole: cut plain text only where a file has more than four million characters.

    Raises:
        UsageError: a pattern matches nothing, a file is empty, unreadable or not UTF-8, a row lacks the field.
    """
    paths = expand(patterns)
    check_readers(paths)
    plain = [path for path in paths if not is_rows(path)]
    cuts = len(plain) < _MANY_FILES
    size = _LARGEST_DOCUMENT if whole else None if cuts else sys.maxsize
    located = partial(_documents_of_files, paths, text_field, size)
    return _corpus_of_files(f"{len(paths)} file(s): {', '.join(patterns)}", paths, text_field, located)


def _documents_of_files(paths: list[Path], text_field: str, size: int | None) -> Iterator[tuple[Path, str]]:
    for path in paths:
        texts = read_rows(path, text_field) if is_rows(path) else read_pieces(path, size or _piece_size(path))
        yield from ((path, text) for text in texts if text.strip())


def _piece_size(path: Path) -> int:
    """Characters of a piece. It depends on the file alone: by the total size, an added file would move all cuts."""
    return min(max(path.stat().st_size // 200, 2 << 10), 64 << 10)


def hugging_face(name: str, text_field: str) -> Corpus:
    """The `train` split of a dataset, streamed: `owner/dataset[:config]` on the Hub, or a local dataset folder.

    A dataset of the Hub is known by its revision, and that revision is read; a folder by the content of its files.

    Raises:
        UsageError: `datasets` is not installed, the dataset cannot be read or has no such column.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f'hf_dataset={name!r} needs: pip install "lightning-tricks[datasets]"')
    dataset = _Dataset(name, text_field)
    return Corpus(f"Hugging Face dataset {name}", dataset.identity, None, dataset.located)


@dataclass
class _Dataset:
    """A dataset, by name; `identity` fixes the revision that `located` reads."""

    name: str
    text_field: str
    options: dict[str, Any] = field(default_factory=dict)

    def identity(self, cache_dir: Path, recorded: bool) -> str:
        path = self.name.partition(":")[0]
        if (folder := Path(path)).is_dir():
            visible = [f for f in sorted(folder.rglob("*")) if all(map(_is_visible, f.relative_to(folder).parts))]
            files = [file for file in visible if file.is_file()]
            names = [str(file.relative_to(folder)) for file in files]  # which also tell the split
            content: object = list(zip(names, file_hashes(files, cache_dir), strict=True))
        else:
            self.options["revision"] = content = known_revision(path, cache_dir, recorded)
        config = self.name.partition(":")[2]
        return hashlib.sha256(repr((config, self.text_field, content)).encode()).hexdigest()

    def located(self) -> Iterator[tuple[None, str]]:
        import datasets

        path, _, config = self.name.partition(":")
        try:
            for row in datasets.load_dataset(path, config or None, split="train", streaming=True, **self.options):
                text = row.get(self.text_field)
                if text is None and self.text_field in row:
                    continue  # a row without text
                if not isinstance(text, str):
                    raise UsageError(f"text_field={self.text_field!r}: {self.name} has the columns {_names(row)}")
                if text.strip():
                    yield None, _characters(text)
        except UsageError:
            raise
        except Exception as error:  # the Hub, the network and the formats each raise their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UsageError(f"hf_dataset={self.name!r}: cannot be read ({reason})") from error
