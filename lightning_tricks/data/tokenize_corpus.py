"""Text -> a folder of token shards, part by part, by any number of processes and hosts, and again after a kill.

Each part of the corpus becomes a folder of its own in `.<name>.unfinished` beside the result, whole or not at all, so a
killed process loses the part that it was at. Who finds that all parts are there links their shards into the result:
nobody waits for anybody, and the result is the same for each number of processes.

A document is held out for validation if its hash is small. That depends on its own text alone, so no document moves
between training and validation when others are added or reordered, and duplicates are never in both.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.accounting.device_speed import available_cores
from lightning_tricks.data.content import build_once
from lightning_tricks.data.corpus import Corpus
from lightning_tricks.data.shards import ByteCorrections, ShardWriter, token_dtype
from lightning_tricks.data.text_encoder import TextEncoder
from lightning_tricks.data.tokenizer import (
    end_of_text,
    load_tokenizer,
    token_texts,
    tokenizer_sha256,
    train_bpe,
    vocabulary_size,
)

FORMAT_VERSION = 1  # part of the cache key: raise it when the same input gives other files
BPE_BYTES = 200_000_000  # a tokenizer learns from at most this much training text
_LINE_SECONDS = 60  # between lines on the progress where there is no terminal


def document_hash(document: str) -> int:
    """64 bits of the document's SHA-256."""
    return _hash(document.encode())


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big")


def validation_threshold(documents: Iterable[str], val_fraction: float) -> int:
    """The bound below which a document's hash puts it into validation.

    Normally `val_fraction * 2**64`. If that selects none of a few documents, or all of them, the document nearest to
    the bound goes to the empty part. Reading stops as soon as both parts are known to have a document.

    Raises:
        UsageError: there are not two different documents, one for each part.
    """
    threshold = round(val_fraction * 2**64)
    low, high = 2**64, -1
    for document in documents:
        number = document_hash(document)
        low, high = min(low, number), max(high, number)
        if low < threshold <= high:
            return threshold
    if low >= high:
        found = "no text" if high < 0 else "one document"
        raise UsageError(f"files: {found} where training and validation need a document each; add text")
    return low + 1 if low >= threshold else high


def training_sample(corpus: Corpus, threshold: int, texts: int = 1) -> Iterator[str]:
    """Training documents, until there is enough to learn a tokenizer from, together with as much of the other texts."""
    seen = 0
    for document in corpus.documents():
        if seen >= BPE_BYTES // texts:
            return
        if document_hash(document) >= threshold:
            seen += len(document)
            yield document


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """A folder of shards to be made of a text; each document is followed by the end-of-text token.

    Args:
        corpus: the text.
        folder: the result; its parent also gets the unfinished parts.
        tokenizer: None learns a byte-level BPE from the training documents.
        vocab_size: tokens to learn.
        val_fraction: share of the documents held out; 1 leaves no training part.
    """

    corpus: Corpus
    folder: Path
    tokenizer: Tokenizer | None
    vocab_size: int
    val_fraction: float

    def build(self, rank: int = 0, world: int = 1) -> int:
        """Encode each `world`th part from `rank` on, and make the folder if no part is missing.

        Returns:
            Number of parts that are missing, which other ranks make.

        Raises:
            UsageError: text that cannot be read, a cache that cannot be written.
        """
        if not self.folder.exists():
            try:
                self._encode_parts(range(rank, self.n_parts, world))
                if missing := sum(not self._part(number).exists() for number in range(self.n_parts)):
                    return missing
                build_once(self.folder, self._join)
            except UsageError:
                if not self.folder.exists():  # else another process has just made it, and removed the parts
                    raise
        shutil.rmtree(self._unfinished, ignore_errors=True)  # parts of the folder that is there, by their name
        return 0

    @property
    def _unfinished(self) -> Path:
        return self.folder.parent / f".{self.folder.name}.unfinished"

    def _part(self, number: int) -> Path:
        return self._unfinished / f"part_{number:06d}"

    @property
    def n_parts(self) -> int:
        """The parts in which the corpus is read."""
        return max(len(self.corpus.parts), 1)

    def _documents(self, number: int) -> Iterator[str]:
        located = self.corpus.parts[number][1] if self.corpus.parts else self.corpus.located
        return (text for _, text in located())

    # -- what is the same for all parts

    @cached_property
    def _threshold(self) -> int:
        if self.val_fraction == 1:
            return 2**64
        return validation_threshold(self.corpus.documents(), self.val_fraction)

    @cached_property
    def _encoder(self) -> TextEncoder:
        """Of the tokenizer that the first process has learned, or of the given one."""
        build_once(self._unfinished / "tokenizer", self._save_tokenizer)
        return TextEncoder(load_tokenizer(self._unfinished / "tokenizer" / "tokenizer.json"))

    def _save_tokenizer(self, folder: Path) -> None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            say(f"Learning a tokenizer of {self.vocab_size} tokens from {self.corpus.description}", file=sys.stderr)
            tokenizer = train_bpe(training_sample(self.corpus, self._threshold), self.vocab_size)
        # not tokenizer.save, whose errors do not say that they are the disk's
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")

    @cached_property
    def _token_texts(self) -> Sequence[bytes] | None:
        return token_texts(self._encoder.tokenizer)

    # -- one part

    def _write_part(self, number: int, folder: Path, threads: int, progress: Callable[[int], object]) -> None:
        """Write both splits, and of each its size, and the SHA-256 of its documents, one after the other in UTF-8.

        If all is held out, there is no training part, and an end-of-text token comes first: the first token of a
        stream has no loss, and each byte of the text shall count.
        """
        tokenizer = self._encoder.tokenizer
        end, size = np.array([end_of_text(tokenizer)]), vocabulary_size(tokenizer)
        splits = ("val",) if self._threshold == 2**64 else ("train", "val")
        counts = {split: {"documents": 0, "bytes": 0} for split in splits}
        hashes = {split: hashlib.sha256() for split in counts}
        corrections = ByteCorrections(folder, self._token_texts)
        with ExitStack() as stack:
            writers = {split: stack.enter_context(ShardWriter(folder, split, size)) for split in counts}
            if "train" not in splits and number == 0:
                writers["val"].append(end)
            for document, ids in self._encoder.encode_all(self._documents(number), threads):
                raw = document.encode()
                split = "val" if _hash(raw) < self._threshold else "train"
                writers[split].append(ids)
                writers[split].append(end)
                if split == "val":
                    corrections.add(ids, len(raw), writers[split].tokens - 1)
                hashes[split].update(raw)
                counts[split]["documents"] += 1
                counts[split]["bytes"] += len(raw)
                progress(len(raw))
        corrections.save()
        figures = {s: {**counts[s], "tokens": writers[s].tokens, "sha256": hashes[s].hexdigest()} for s in counts}
        shards = {path.name: _sha256(path) for path in sorted(folder.glob("*.bin"))}
        _write_json(folder / "part.json", {"splits": figures, "shards": shards})

    def _record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._part(number) / "part.json").read_text(encoding="utf-8"))
        return found

    # -- all parts

    def _encode_parts(self, numbers: Sequence[int]) -> None:
        """Write those of some parts that are not there, in as many processes as there are cores."""
        numbers = [number for number in numbers if not self._part(number).exists()]
        if not numbers:
            return
        _ = self._threshold, end_of_text(self._encoder.tokenizer), self._token_texts  # once, and not in each process
        if len(numbers) > 1:
            self._encoder.compare(self.corpus.documents())

        def work(number: int, threads: int, progress: Callable[[int], object]) -> None:
            if not self.folder.exists():  # another process may have made it, and removed the parts
                build_once(self._part(number), lambda folder: self._write_part(number, folder, threads, progress))

        forks = sys.platform == "linux" and not multiprocessing.current_process().daemon  # which may have no children
        processes = min(len(numbers), available_cores()) if forks else 1
        sizes = [n_bytes for n_bytes, _ in self.corpus.parts] or [self.corpus.n_bytes or 0]
        total, done = sum(sizes[number] for number in numbers), 0
        with _progress(self.corpus.description, total or None) as bar:
            finished = _in_processes(processes, work, numbers, bar) if processes > 1 else _here(work, numbers, bar)
            for number in finished:
                done += sizes[number]
                if done:  # bytes of files, in which there are other columns, or which are compressed
                    bar.total = round(bar.n / done * total)

    def _join(self, folder: Path) -> None:
        """Link the shards of all parts into `folder`, numbered through, and write the record of them."""
        tokenizer, records = self._encoder.tokenizer, [self._record(number) for number in range(self.n_parts)]
        shutil.copyfile(self._unfinished / "tokenizer" / "tokenizer.json", folder / "tokenizer.json")
        numbers, shards = Counter[str](), dict[str, str]()
        for number, record in enumerate(records):
            for name, sha256 in record["shards"].items():
                split = name.partition("_")[0]
                new = f"{split}_{numbers[split]:06d}.bin"
                _link(self._part(number) / name, folder / new)
                numbers[split], shards[new] = numbers[split] + 1, sha256
        splits = {s: _total([record["splits"][s] for record in records]) for s in records[0]["splits"]}
        before = np.cumsum([0, *(record["splits"]["val"]["tokens"] for record in records)])
        corrections = [ByteCorrections.load(self._part(number)) for number in range(self.n_parts)]
        if all(part is not None for part in corrections):
            moved = [part + np.array([n, 0]) for part, n in zip(corrections, before, strict=False) if part is not None]
            np.save(folder / ByteCorrections.FILE, np.concatenate(moved))
        size = vocabulary_size(tokenizer)
        meta = {
            "format_version": FORMAT_VERSION,
            "source": self.corpus.description,
            "python": platform.python_version(),
            "val_fraction": self.val_fraction,
            "vocab_size": size,
            "dtype": np.dtype(token_dtype(size)).name,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            **splits,
            "shards": shards,
        }
        _write_json(folder / "meta.json", meta)


def _total(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all parts of a split; the hash of several parts is that of their hashes, one after the other."""
    sums = {name: sum(part[name] for part in figures) for name in ("documents", "bytes", "tokens")}
    hashes = [part["sha256"] for part in figures]
    return sums | {"sha256": hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except OSError:  # a filesystem without hard links
        shutil.copyfile(path, new)


# -- work on parts: a function of a part's number, the threads to use, and what to call with the bytes that are done

Work = Callable[[int, int, Callable[[int], object]], None]


def _here(work: Work, numbers: list[int], bar: "tqdm[Any]") -> Iterator[int]:
    """Do the work in this process; yield each number when its part is done."""
    for number in numbers:
        work(number, available_cores(), bar.update)
        yield number


def _in_processes(processes: int, work: Work, numbers: list[int], bar: "tqdm[Any]") -> Iterator[int]:
    """The same in copies of this process, which have all that it has read so far, and end with it."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start_worker, (work,)) as pool:
        futures = {pool.submit(_work, number): number for number in numbers}
        try:
            for future in as_completed(futures):
                bar.update(future.result())
                yield futures[future]
        except BrokenProcessPool as error:
            why = "a process that encodes was killed, perhaps as memory ran out"
            raise UsageError(f"prepare: {why}; start again, and what is finished is kept") from error
        finally:
            pool.shutdown(cancel_futures=True)


_work_of_copies: Work


def _start_worker(work: Work) -> None:
    global _work_of_copies
    _work_of_copies = work
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # not what the run does at a signal
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int) -> int:
    """Do a part, and count its bytes."""
    sizes = list[int]()
    _work_of_copies(number, 1, sizes.append)
    return sum(sizes)


# -- progress


class _Lines(tqdm):
    """A bar as lines, for logs."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if msg is None:  # else it is to be wiped out
            say(str(self), file=sys.stderr)


def _progress(what: str, total: int | None) -> "tqdm[Any]":
    """A bar of bytes of text; where there is no terminal, a line at the start, and one each minute."""
    options: dict[str, Any] = {"desc": "Tokenizing", "total": total, "unit": "B", "unit_scale": True, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**options)
    say(f"Tokenizing {what}", file=sys.stderr)
    form = "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
    seconds = {"delay": _LINE_SECONDS, "mininterval": _LINE_SECONDS, "maxinterval": float("inf")}
    return _Lines(**options, **seconds, miniters=1, bar_format=form)
