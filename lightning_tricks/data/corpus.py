"""Sources of text: the standard library, files, or a Hugging Face dataset, each as a stream of documents."""

import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks.data.content import file_hashes, known_revision
from lightning_tricks.data.remote import RemoteFile, file_size
from lightning_tricks.data.text_files import (
    Span,
    TextFile,
    check_readers,
    compression_of,
    expand,
    first_names,
    is_rows,
    is_visible,
    read_pieces,
    read_rows,
    suffix_of,
    without_surrogates,
)

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
    kinds = [(suffix_of(path) if is_rows(path) else "plain", compressed[compression_of(path)]) for path in paths]
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
    size, identity = sum(map(file_size, paths)), partial(_identity_of_files, paths, version)
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
    return Corpus(description, identity, sum(map(file_size, paths)), located, tuple(parts))


def _cut(paths: Sequence[TextFile]) -> Iterator[tuple[int, list[Span]]]:
    """Consecutive parts of the files, each with its bytes; they depend on the sizes of the files alone.

    Rows are cut within a file. Of plain text a cut would move the documents, and compressed text has no places.
    """
    size = min(max(sum(map(file_size, paths)) // _PARTS, _SMALLEST_PART), _LARGEST_PART)
    spans, n_bytes = list[Span](), 0
    for path in paths:
        length = file_size(path)
        number = max(length // size, 1) if is_rows(path) and not compression_of(path) else 1
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
    return min(max(file_size(path) // 200, 2 << 10), 64 << 10)


def hugging_face(name: str, text_field: str) -> Corpus:
    """The `train` split of a dataset, streamed: `owner/dataset[:config]` on the Hub, or a local dataset folder.

    A dataset of the Hub is known by its revision, and that revision is read; a folder by the content of its files.

    Raises:
        UsageError: `datasets` is not installed, the dataset cannot be read or has no such column.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"hf_dataset={name!r} needs datasets: {PIP_EXTRA.format('datasets')}")
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
            visible = [f for f in sorted(folder.rglob("*")) if all(map(is_visible, f.relative_to(folder).parts))]
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
                    raise UsageError(f"text_field={self.text_field!r}: {self.name} has the columns {first_names(row)}")
                if text.strip():
                    yield None, without_surrogates(text)
        except UsageError:
            raise
        except Exception as error:  # the Hub, the network and the formats each raise their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UsageError(f"hf_dataset={self.name!r}: cannot be read ({reason})") from error
