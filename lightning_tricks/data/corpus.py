"""Sources of text: the standard library, files, or a Hugging Face dataset, each as a stream of documents."""

import hashlib
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks.data.readers import check_readers, expand, is_rows, read_file, read_pieces, read_rows

Documents = Callable[[], Iterator[str]]
Located = Callable[[], Iterator[tuple[Path, str]]]
_MANY_FILES = 100


@dataclass(frozen=True)
class Corpus:
    """Documents, and their description before they are read.

    Args:
        description: one line for the record in meta.json.
        fingerprint: changes when the documents may have changed; part of the cache's key.
        n_bytes: approximate size of the text, for the progress bar; None when unknown.
        documents: called for each pass, yields the non-empty documents in a fixed order.
        located: yields the same documents, each as (file, text); None where they come from no files.
    """

    description: str
    fingerprint: str
    n_bytes: int | None
    documents: Documents
    located: Located | None = None


def _corpus_of_files(description: str, paths: list[Path], setting: str, located: Located) -> Corpus:
    """A corpus whose fingerprint changes with `setting` and with any file's path, size or time of change."""
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    fingerprint = hashlib.sha256(repr((stats, (setting,))).encode()).hexdigest()

    def documents() -> Iterator[str]:
        return (text for _, text in located())

    return Corpus(description, fingerprint, sum(size for _, size, _ in stats), documents, located)


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

    def located() -> Iterator[tuple[Path, str]]:
        seen = set()
        for path in paths:
            try:
                text = path.read_bytes().decode("utf-8", errors="replace")
            except OSError as error:
                raise UsageError(f"files: {path} cannot be read ({error.strerror or error})") from error
            if text.strip() and text not in seen:
                seen.add(text)
                yield path, text

    version = platform.python_version()
    return _corpus_of_files(f"the standard library of Python {version}", paths, version, located)


def text_files(patterns: list[str], text_field: str) -> Corpus:
    """Files, folders and globs.

    Each row of a .jsonl or .parquet file is a document. Any other file is plain UTF-8 text: if there are 100 or more,
    each is a document. If there are fewer, each is cut after blank lines into documents of about a two hundredth of
    the file (2 to 64 KiB), so that one big file has a validation part too. An added file leaves the documents of the
    others as they are, unless it is the hundredth.

    Raises:
        UsageError: a pattern matches nothing, a file is empty, unreadable or not UTF-8, a row lacks the field.
    """
    paths = expand(patterns)
    check_readers(paths)
    plain = [path for path in paths if not is_rows(path)]
    cuts = len(plain) < _MANY_FILES

    def located() -> Iterator[tuple[Path, str]]:
        for path in paths:
            if is_rows(path):
                texts = read_rows(path, text_field)
            elif cuts:
                texts = read_pieces(path, _piece_size(path))
            else:
                texts = read_file(path)
            yield from ((path, text) for text in texts if text.strip())

    # several files were once cut by their total size: a cache from then does not hold these documents
    setting = f"{text_field}, cut file by file" if cuts and len(plain) > 1 else text_field
    return _corpus_of_files(f"{len(paths)} file(s): {', '.join(patterns)}", paths, setting, located)


def _piece_size(path: Path) -> int:
    """Characters of a piece. It depends on the file alone: by the total size, an added file would move all cuts."""
    return min(max(path.stat().st_size // 200, 2 << 10), 64 << 10)


def hugging_face(name: str, text_field: str) -> Corpus:
    """The `train` split of a dataset, streamed: `owner/dataset[:config]` on the Hub, or a local dataset folder.

    Raises:
        UsageError: `datasets` is not installed, the dataset cannot be read or has no such column.
    """
    path, _, config = name.partition(":")
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f'hf_dataset={name!r} needs: pip install "lightning-tricks[datasets]"')

    def documents() -> Iterator[str]:
        import datasets

        try:
            for row in datasets.load_dataset(path, config or None, split="train", streaming=True):
                if not isinstance(row.get(text_field), str):
                    raise UsageError(f"text_field={text_field!r}: {name} has the columns {', '.join(row)}")
                if row[text_field].strip():
                    yield row[text_field]
        except UsageError:
            raise
        except Exception as error:  # the Hub, the network and the formats each raise their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UsageError(f"hf_dataset={name!r}: cannot be read ({reason})") from error

    fingerprint = hashlib.sha256(repr((name, text_field)).encode()).hexdigest()
    return Corpus(f"Hugging Face dataset {name}", fingerprint, None, documents)
