"""Turn a corpus into a folder of shards: tokenizer.json, train_*.bin, val_*.bin and meta.json.

Two passes over the documents: one to learn the tokenizer where none is given, one to encode.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from lightning_tricks.data.bpe import end_of_text, train_bpe, vocabulary_size
from lightning_tricks.data.corpus import Corpus
from lightning_tricks.data.saved_tokenizer import tokenizer_sha256
from lightning_tricks.data.shards import ShardWriter, token_dtype
from lightning_tricks.data.split import document_hash, validation_threshold

FORMAT_VERSION = 1  # part of the cache key: raise it when the same input gives other files
BPE_BYTES = 200_000_000  # a tokenizer learns from at most this much training text
_CHUNK_BYTES = 1 << 20  # text encoded at once


@dataclass
class SplitRecord:
    """Size of the training or validation part; `sha256` is that of its documents' UTF-8 bytes, one after the other."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    sha256: str = ""


def tokenize_corpus(
    corpus: Corpus, folder: Path, tokenizer: Tokenizer | None, vocab_size: int, val_fraction: float
) -> dict[str, Any]:
    """Write the shards of `corpus` into `folder`, which exists and is empty.

    Each document is followed by the end-of-text token.

    Args:
        corpus: the documents.
        folder: where the files go.
        tokenizer: encode with this one; None learns a byte-level BPE from the training documents.
        vocab_size: tokens to learn when `tokenizer` is None.
        val_fraction: share of the documents held out, by their hash.

    Returns:
        The record written to meta.json.
    """
    threshold = validation_threshold(corpus.documents(), val_fraction)
    if tokenizer is None:
        _say(f"Learning a tokenizer of {vocab_size} tokens from {corpus.description}")
        tokenizer = train_bpe(_sample(corpus, threshold), vocab_size)
    # not tokenizer.save, whose errors do not say that they are the disk's
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    records = _write_splits(corpus, folder, tokenizer, threshold)
    size = vocabulary_size(tokenizer)
    meta = {
        "format_version": FORMAT_VERSION,
        "source": corpus.description,
        "python": platform.python_version(),
        "val_fraction": val_fraction,
        "vocab_size": size,
        "dtype": np.dtype(token_dtype(size)).name,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        **{split: asdict(record) for split, record in records.items()},
    }
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    return meta


def _sample(corpus: Corpus, threshold: int) -> Iterator[str]:
    """Training documents, until there is enough to learn a tokenizer from."""
    seen = 0
    for document in corpus.documents():
        if seen >= BPE_BYTES:
            return
        if document_hash(document) >= threshold:
            seen += len(document)
            yield document


def _write_splits(corpus: Corpus, folder: Path, tokenizer: Tokenizer, threshold: int) -> dict[str, SplitRecord]:
    end, size = end_of_text(tokenizer), vocabulary_size(tokenizer)
    records = {split: SplitRecord() for split in ("train", "val")}
    hashes = {split: hashlib.sha256() for split in records}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(folder, split, size)) for split in records}
        bar = stack.enter_context(_progress(corpus))
        for document, ids in _encoded(tokenizer, corpus.documents()):
            raw = document.encode()
            split = "val" if document_hash(document) < threshold else "train"
            writers[split].append(np.array([*ids, end]))
            hashes[split].update(raw)
            records[split].documents += 1
            records[split].bytes += len(raw)
            bar.update(len(raw))
    for split, record in records.items():
        record.tokens, record.sha256 = writers[split].tokens, hashes[split].hexdigest()
    return records


def _encoded(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[tuple[str, list[int]]]:
    """Each document with its token ids, encoded in parallel a megabyte at a time."""
    for chunk in _chunks(documents):
        for document, encoding in zip(chunk, tokenizer.encode_batch_fast(chunk, add_special_tokens=False), strict=True):
            yield document, encoding.ids


def _chunks(documents: Iterator[str]) -> Iterator[list[str]]:
    for first in documents:
        chunk, length = [first], len(first)
        while length < _CHUNK_BYTES and (more := next(documents, None)) is not None:
            chunk.append(more)
            length += len(more)
        yield chunk


def _progress(corpus: Corpus) -> tqdm:
    if not sys.stderr.isatty():
        _say(f"Tokenizing {corpus.description}")
    return tqdm(
        desc="Tokenizing", total=corpus.n_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
