"""Sources of text: the standard library, files, or a Hugging Face dataset, each as a stream of documents.

Files are read whole, in pieces, or row by row, here or behind a URL. Every error names its file.
"""

import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
import platform
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data.content import file_hashes, known_revision
from lightning_tricks.data.remote import BlockCache, RemoteFile, find_remote

# the files of a folder that are read; a glob takes any name
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".ndjson", ".parquet")
_OTHER_SUFFIXES = {  # of files that are no text, or not text as it stands
    "convert it to .jsonl or .parquet, of which each row is a document": (
        *(".csv", ".tsv", ".json", ".xlsx", ".arrow", ".feather", ".orc", ".avro", ".sqlite", ".pdf", ".docx"),
    ),
    "unpack it, or compress each file as .gz or .zst": (".zip", ".tar", ".tgz", ".7z", ".bz2", ".xz", ".lz4"),
    "give token files to TokenData": (".bin", ".idx", ".ds", ".npy", ".npz", ".mds", ".pt"),
}
TextFile = Path | RemoteFile


def _compression(path: TextFile) -> str:
    suffix = PurePosixPath(str(path)).suffix.lower()
    return suffix if suffix in (".gz", ".zst") else ""


def _suffix(path: TextFile) -> str:
    """The ending that tells the kind, in small letters, without .gz or .zst; that of .ndjson is .jsonl."""
    name = PurePosixPath(str(path))
    suffix = (PurePosixPath(name.stem) if _compression(path) else name).suffix.lower()
    return ".jsonl" if suffix == ".ndjson" else suffix


def _size(path: TextFile) -> int:
    return path.size if isinstance(path, RemoteFile) else path.stat().st_size


def is_rows(path: TextFile) -> bool:
    """Whether a row of the file is a document."""
    return _suffix(path) in (".jsonl", ".parquet")


def check_readers(paths: Sequence[TextFile]) -> None:
    """Refuse a file that is known to be no text, and one whose library is missing."""
    for path in paths:
        for remedy, suffixes in _OTHER_SUFFIXES.items():
            if (suffix := _suffix(path)) in suffixes:
                raise UsageError(f"files: {path} is no text by its ending {suffix}; {remedy}")
    needing = next((path for path in paths if _suffix(path) == ".parquet" or _compression(path) == ".zst"), None)
    if needing is not None and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f'files: {needing} needs: pip install "lightning-tricks[parquet]"')


def expand(patterns: list[str]) -> list[TextFile]:
    """The files of paths, folders, globs and URLs: sorted, each once.

    Raises:
        UsageError: a pattern matches nothing, or a file that was named itself is empty.
    """
    found = set[TextFile]()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        try:
            files = set(_remote(pattern) if "://" in pattern else _local(path))
        except OSError as error:
            why = f"{error.filename or path} cannot be read ({error.strerror or error})"
            raise UsageError(f"files={pattern!r}: {why}; leave it out or change rights") from error
        if not files:
            kinds = f" ending in {' '.join(TEXT_SUFFIXES)}" if path.is_dir() else ""
            raise UsageError(f"files: {pattern!r} matches no file with text in it{kinds}; check the path")
        found |= files
    paths = sorted(file for file in found if isinstance(file, Path))
    return [*paths, *sorted((file for file in found if isinstance(file, RemoteFile)), key=str)]


def _local(path: Path) -> Iterator[TextFile]:
    return (file.resolve() for file in _matches(path) if file.is_file() and file.stat().st_size)


def _remote(url: str) -> Iterator[TextFile]:
    def texts(files: list[RemoteFile]) -> list[RemoteFile]:
        return [file for file in files if _suffix(file) in TEXT_SUFFIXES]

    return (file for file in find_remote(url, BlockCache(Path(), 0), texts) if file.size)  # read once, so not cached


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


@dataclass(frozen=True)
class Span:
    """The lines or row groups of a file that begin at byte `start` or later and before `stop`.

    Spans that follow each other have each row once, and are cut without a look into the file.
    """

    path: TextFile
    start: int = 0
    stop: int = sys.maxsize


class _Bytes(io.RawIOBase):
    """Bytes `start` to `stop` - 1 of a file."""

    def __init__(self, path: TextFile, start: int = 0, stop: int = sys.maxsize) -> None:
        self._path, self._at, self._stop = path, start, min(stop, _size(path))
        self._local = path.open("rb", buffering=0) if isinstance(path, Path) else None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._stop)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._stop - self._at), 0)
        if self._local is not None:
            self._local.seek(self._at)
            data = self._local.read(count)
        else:
            data = cast(RemoteFile, self._path).head(self._at, count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        super().close()


def _open(path: TextFile, start: int = 0, stop: int = sys.maxsize) -> BinaryIO:
    return io.BufferedReader(_Bytes(path, start, stop), 1 << 16 if isinstance(path, Path) else 8 << 20)


def _line_start(path: TextFile, offset: int) -> int:
    """Where the first line begins at `offset` or later."""
    if offset == 0 or offset >= _size(path):
        return offset
    with _open(path, offset - 1) as file:
        return offset - 1 + len(file.readline())


def _open_plain(span: Span) -> BinaryIO:
    """The bytes of a span's lines, decompressed."""
    if (kind := _compression(span.path)) == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=_open(span.path)))
    if kind == ".zst":
        import pyarrow  # unlike the package zstandard, it says where a file is cut short

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(_open(span.path), "zstd")))
    return _open(span.path, _line_start(span.path, span.start), _line_start(span.path, span.stop))


def _lines(span: Span, limit: int = -1) -> Iterator[str]:
    """The lines of a text file, compressed or not; with `limit`, in parts of at most so many characters."""
    path, encoding = span.path, "utf-8" if span.start else "utf-8-sig"  # a byte order mark is no text
    try:
        # newline="" keeps the line ends
        with _open_plain(span) as plain, io.TextIOWrapper(plain, encoding, newline="") as file:
            while line := file.readline(limit):
                if "\0" in line:
                    raise UsageError(f"files: {path} is no UTF-8 text (it has zero bytes); convert it or leave it out")
                yield line
    except UnicodeDecodeError as error:
        raise UsageError(f"files: {path} is not UTF-8 text ({error.reason}); convert it or leave it out") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"files: {path} cannot be read ({reason})") from error


def read_pieces(path: TextFile, size: int) -> Iterator[str]:
    """The file in pieces of about `size` characters; joined, they are the file.

    A piece ends after a blank line, or if none comes within twice the size, at a line's end or within a long line.
    """
    piece: list[str] = []
    length, starts_line = 0, True
    for part in _lines(Span(path), limit=size):  # a line, or a part of a line that is longer than the size
        piece.append(part)
        length += len(part)
        blank = starts_line and not part.strip()
        starts_line = part[-1] in "\r\n"
        if length >= 2 * size or (length >= size and blank):
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def read_rows(span: Span, text_field: str) -> Iterator[str]:
    """The text of each row of a .jsonl or .parquet file."""
    return _read_parquet(span, text_field) if _suffix(span.path) == ".parquet" else _read_jsonl(span, text_field)


def _read_jsonl(span: Span, text_field: str) -> Iterator[str]:
    path, after = span.path, f" after byte {span.start:,}" if span.start else ""
    for number, line in enumerate(_lines(span), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"files: {path}, line {number}{after} is not JSON ({error})") from error
        if not isinstance(row, dict) or text_field not in row:
            keys = _names(row) if isinstance(row, dict) else type(row).__name__
            where = f"{path}, line {number}{after}"
            raise UsageError(f"text_field={text_field!r}: {where} has {keys}; name the key of its text")
        if row[text_field] is not None:  # a row may have no text
            yield _characters(_checked(row[text_field], text_field, f"{path}, line {number}{after}"))


def _checked(text: object, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise UsageError(
            f"text_field={text_field!r}: {where} has {str(text)[:40]} there and no text: name that of texts"
        )
    return text


def _characters(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can contain and which are no characters."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _names(names: Iterable[object]) -> str:
    """The first names of keys or columns, in one line of a readable length."""
    text = ", ".join(str(name) for name in islice(names, 20))
    text = "".join(char if char.isprintable() else "?" for char in text)
    return "no keys" if not text else text if len(text) <= 200 else f"{text[:200]}..."


def _read_parquet(span: Span, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    path = span.path
    try:
        with pyarrow.parquet.ParquetFile(path if isinstance(path, Path) else _open(path)) as file:
            if text_field not in (names := file.schema_arrow.names):
                raise UsageError(f"text_field={text_field!r}: {path} has {_names(names)}; name the column of its text")
            columns = [file.metadata.row_group(group).column(0) for group in range(file.num_row_groups)]
            offsets = [column.dictionary_page_offset or column.data_page_offset for column in columns]
            groups = [group for group, offset in enumerate(offsets) if span.start <= offset < span.stop]
            for rows in file.iter_batches(1024, row_groups=groups, columns=[text_field]):
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
_PARTS, _SMALLEST_PART, _LARGEST_PART = 1000, 32 << 20, 512 << 20  # how many, and bytes of one
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
        parts: the same documents in consecutive parts, each with its size; none where it is read as a whole.
    """

    description: str
    identity: Callable[[Path, bool], str]
    n_bytes: int | None
    located: Located
    parts: tuple[tuple[int, Located], ...] = ()

    def documents(self) -> Iterator[str]:
        """The texts alone, in the same order."""
        return (text for _, text in self.located())


def _identity_of_files(paths: Sequence[TextFile], setting: str, cache_dir: Path, recorded: bool = False) -> str:
    """Depends on what is read from the files, in their order: their content, and the reader that their names choose."""
    compressed = {"": False, ".gz": True, ".zst": ".zst"}
    kinds = [(_suffix(path) if is_rows(path) else "plain", compressed[_compression(path)]) for path in paths]
    local = iter(file_hashes([path for path in paths if isinstance(path, Path)], cache_dir))
    hashes = [f"{p.size} {p.version or p.url}" if isinstance(p, RemoteFile) else next(local) for p in paths]
    content = list(zip(kinds, hashes, strict=True))
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
    size, identity = sum(map(_size, paths)), partial(_identity_of_files, paths, version)
    return Corpus(f"the standard library of Python {version}", identity, size, partial(_sources, paths))


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
    """Files, folders, globs and URLs.

    Each row of a .jsonl or .parquet file is a document. Any other file is plain UTF-8 text: if there are 100 or more,
    each is a document. If there are fewer, each is cut after blank lines into documents of about a two hundredth of
    the file (2 to 64 KiB), so that one big file has a validation part too. An added file leaves the documents of the
    others as they are, unless it is the hundredth.

    Args:
        patterns: paths, folders, globs and URLs that fsspec knows.
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
    description = f"{len(paths)} file(s): {', '.join(patterns)}"
    identity = partial(_identity_of_files, paths, text_field)
    located = partial(_documents_of_files, [Span(path) for path in paths], text_field, size)
    parts = [(n_bytes, partial(_documents_of_files, spans, text_field, size)) for n_bytes, spans in _cut(paths)]
    return Corpus(description, identity, sum(map(_size, paths)), located, tuple(parts))


def _cut(paths: Sequence[TextFile]) -> Iterator[tuple[int, list[Span]]]:
    """Consecutive parts of the files, each with its bytes; they depend on the sizes of the files alone.

    Rows are cut within a file. Of plain text a cut would move the documents, and compressed text has no places.
    """
    size = min(max(sum(map(_size, paths)) // _PARTS, _SMALLEST_PART), _LARGEST_PART)
    spans, n_bytes = list[Span](), 0
    for path in paths:
        length = _size(path)
        number = max(length // size, 1) if is_rows(path) and not _compression(path) else 1
        cuts = [length * cut // number for cut in range(number)]
        for start, stop in zip(cuts, [*cuts[1:], sys.maxsize], strict=True):
            spans.append(Span(path, start, stop))
            n_bytes += min(stop, length) - start
            if n_bytes >= size:
                yield n_bytes, spans
                spans, n_bytes = [], 0
    if spans:
        yield n_bytes, spans


def _documents_of_files(spans: list[Span], text_field: str, size: int | None) -> Iterator[tuple[Path | None, str]]:
    for span in spans:
        path = span.path
        texts = read_rows(span, text_field) if is_rows(path) else read_pieces(path, size or _piece_size(path))
        yield from ((path if isinstance(path, Path) else None, text) for text in texts if text and not text.isspace())


def _piece_size(path: TextFile) -> int:
    """Characters of a piece. It depends on the file alone: by the total size, an added file would move all cuts."""
    return min(max(_size(path) // 200, 2 << 10), 64 << 10)


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
