"""Files of text, here or behind a URL: which ones a pattern names, and their text in pieces or rows.

Every error names its file.
"""

import glob
import gzip
import importlib.util
import io
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn, cast

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks.data.remote import BlockCache, RemoteFile, file_size, find_remote

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


def compression_of(path: TextFile) -> str:
    """`.gz`, `.zst`, or nothing."""
    suffix = PurePosixPath(str(path)).suffix.lower()
    return suffix if suffix in (".gz", ".zst") else ""


def suffix_of(path: TextFile) -> str:
    """The ending that tells the kind, in small letters, without .gz or .zst; that of .ndjson is .jsonl."""
    name = PurePosixPath(str(path))
    suffix = (PurePosixPath(name.stem) if compression_of(path) else name).suffix.lower()
    return ".jsonl" if suffix == ".ndjson" else suffix


def is_rows(path: TextFile) -> bool:
    """Whether a row of the file is a document."""
    return suffix_of(path) in (".jsonl", ".parquet")


def check_readers(paths: Sequence[TextFile]) -> None:
    """Refuse a file that is known to be no text, and one whose library is missing."""
    for path in paths:
        for remedy, suffixes in _OTHER_SUFFIXES.items():
            if (suffix := suffix_of(path)) in suffixes:
                raise UsageError(f"files: {path} is no text by its ending {suffix}; {remedy}")
    needing = next((path for path in paths if suffix_of(path) == ".parquet" or compression_of(path) == ".zst"), None)
    if needing is not None and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"files: {needing} needs pyarrow: {PIP_EXTRA.format('parquet')}")


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
        return [file for file in files if suffix_of(file) in TEXT_SUFFIXES]

    return (file for file in find_remote(url, BlockCache(Path(), 0), texts) if file.size)  # read once, so not cached


def _matches(path: Path) -> Iterator[Path]:
    """The files of one pattern; raises OSError for a folder that cannot be read."""
    if path.is_dir():
        for folder, folders, names in os.walk(path, onerror=_raise):
            folders[:] = [name for name in folders if is_visible(name)]
            paths = (Path(folder, name) for name in names if is_visible(name))
            yield from (path for path in paths if suffix_of(path) in TEXT_SUFFIXES)
    elif path.exists():
        if path.stat().st_size == 0:
            raise UsageError(f"files: {path} is empty; remove it from the list or fill it")
        yield path
    else:
        yield from map(Path, glob.glob(str(path), recursive=True))


def _raise(error: OSError) -> NoReturn:
    raise error


def is_visible(name: str) -> bool:
    """Whether a file or folder of this name is looked at."""
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
        self._path, self._at, self._stop = path, start, min(stop, file_size(path))
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
    if offset == 0 or offset >= file_size(path):
        return offset
    with _open(path, offset - 1) as file:
        return offset - 1 + len(file.readline())


def _open_plain(span: Span) -> BinaryIO:
    """The bytes of a span's lines, decompressed."""
    if (kind := compression_of(span.path)) == ".gz":
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
    return _read_parquet(span, text_field) if suffix_of(span.path) == ".parquet" else _read_jsonl(span, text_field)


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
            keys = first_names(row) if isinstance(row, dict) else type(row).__name__
            where = f"{path}, line {number}{after}"
            raise UsageError(f"text_field={text_field!r}: {where} has {keys}; name the key of its text")
        if row[text_field] is not None:  # a row may have no text
            yield without_surrogates(_checked(row[text_field], text_field, f"{path}, line {number}{after}"))


def _checked(text: object, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise UsageError(
            f"text_field={text_field!r}: {where} has {str(text)[:40]} there and no text: name that of texts"
        )
    return text


def without_surrogates(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can contain and which are no characters."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def first_names(names: Iterable[object]) -> str:
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
                raise UsageError(
                    f"text_field={text_field!r}: {path} has {first_names(names)}; name the column of its text"
                )
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
