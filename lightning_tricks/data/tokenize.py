"""Turn a corpus into a folder of shards: tokenizer.json, train_*.bin, val_*.bin and meta.json.

A document is held out for validation if its hash is small. That depends on its own text alone, so no document moves
between training and validation when others are added or reordered, and duplicates are never in both. (`text_files` says
how files are cut into documents.)
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from lightning_tricks._errors import UsageError
from lightning_tricks.data.bpe import end_of_text, train_bpe, vocabulary_size
from lightning_tricks.data.corpus import Corpus
from lightning_tricks.data.saved_tokenizer import tokenizer_sha256
from lightning_tricks.data.shards import ShardWriter, token_dtype

FORMAT_VERSION = 1  # part of the cache key: raise it when the same input gives other files
BPE_BYTES = 200_000_000  # a tokenizer learns from at most this much training text
_CHUNK_BYTES = 1 << 20  # text encoded at once


def document_hash(document: str) -> int:
    """64 bits of the document's SHA-256."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")


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


def tokenize_corpus(
    corpus: Corpus, folder: Path, tokenizer: Tokenizer | None, vocab_size: int, val_fraction: float
) -> None:
    """Write the shards of `corpus` into an empty folder, each document followed by the end-of-text token.

    Without a tokenizer, learn a byte-level BPE of `vocab_size` tokens from the training documents.
    """
    threshold = validation_threshold(corpus.documents(), val_fraction)
    if tokenizer is None:
        _say(f"Learning a tokenizer of {vocab_size} tokens from {corpus.description}")
        tokenizer = train_bpe(_sample(corpus, threshold), vocab_size)
    # not tokenizer.save, whose errors do not say that they are the disk's
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    splits = _write_splits(corpus, folder, tokenizer, threshold)
    size = vocabulary_size(tokenizer)
    meta = {
        "format_version": FORMAT_VERSION,
        "source": corpus.description,
        "python": platform.python_version(),
        "val_fraction": val_fraction,
        "vocab_size": size,
        "dtype": np.dtype(token_dtype(size)).name,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        **splits,
    }
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def training_files(corpus: Corpus, val_fraction: float, numbers: Collection[int]) -> dict[int, Path]:
    """The files of training documents, by their numbers in the stream from 0; the text is read up to the last of them.

    Empty where the documents come from no files.
    """
    found: dict[int, Path] = {}
    if corpus.located is None or not numbers:
        return found
    threshold = validation_threshold(corpus.documents(), val_fraction)
    training = (path for path, document in corpus.located() if document_hash(document) >= threshold)
    for number, path in enumerate(islice(training, max(numbers) + 1)):
        if number in numbers:
            found[number] = path
    return found


def _sample(corpus: Corpus, threshold: int) -> Iterator[str]:
    """Training documents, until there is enough to learn a tokenizer from."""
    seen = 0
    for document in corpus.documents():
        if seen >= BPE_BYTES:
            return
        if document_hash(document) >= threshold:
            seen += len(document)
            yield document


def _write_splits(corpus: Corpus, folder: Path, tokenizer: Tokenizer, threshold: int) -> dict[str, dict[str, Any]]:
    """Write both parts; of each, return its size, and the SHA-256 of its documents, one after the other in UTF-8."""
    end, size = end_of_text(tokenizer), vocabulary_size(tokenizer)
    counts = {split: {"documents": 0, "bytes": 0} for split in ("train", "val")}
    hashes = {split: hashlib.sha256() for split in counts}
    quiet = not sys.stderr.isatty()
    if quiet:
        _say(f"Tokenizing {corpus.description}")
    with ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(folder, split, size)) for split in counts}
        bar = tqdm(desc="Tokenizing", total=corpus.n_bytes, unit="B", unit_scale=True, disable=quiet, leave=False)
        stack.enter_context(bar)
        for document, ids in _encoded(tokenizer, corpus.documents()):
            raw = document.encode()
            split = "val" if document_hash(document) < threshold else "train"
            writers[split].append(np.array([*ids, end]))
            hashes[split].update(raw)
            counts[split]["documents"] += 1
            counts[split]["bytes"] += len(raw)
            bar.update(len(raw))
    return {s: {**counts[s], "tokens": writers[s].tokens, "sha256": hashes[s].hexdigest()} for s in counts}


def _encoded(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[tuple[str, list[int]]]:
    """Each document with its token ids, encoded in parallel a megabyte at a time."""
    for first in documents:
        chunk, length = [first], len(first)
        while length < _CHUNK_BYTES and (more := next(documents, None)) is not None:
            chunk.append(more)
            length += len(more)
        for document, encoding in zip(chunk, tokenizer.encode_batch_fast(chunk, add_special_tokens=False), strict=True):
            yield document, encoding.ids


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
