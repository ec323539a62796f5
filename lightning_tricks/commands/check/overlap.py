"""Validation documents that stand in the training data too, by windows of 13 tokens in a sample of both.

A window is known by a hash of 64 bits. Of training tokens, blocks are read that are spread evenly over the stream; what
lies between them is not seen, so the shares are lower bounds unless all tokens were read.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_tricks.data.shards import TokenStream

WINDOW = 13  # tokens
LARGEST_SHARE = 0.01  # of the validation documents, or windows, that is no cause to look
SAMPLE = {"train": 1 << 24, "val": 1 << 20}  # tokens
_BLOCK = {"train": 1 << 17, "val": 1 << 20}  # tokens that are read at once
_FOUND = 0.8  # of a document's windows, by which it stands in the training data
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token of a window is multiplied away
_BITS = 24  # of the table that lets most windows pass without a search


class Overlap(NamedTuple):
    """What was found of a validation stream.

    Attributes:
        documents: with a whole window in the sample.
        found: of them, at least 80 % of whose windows stand in the training sample.
        windows: share of windows that do.
    """

    documents: int
    found: int
    windows: float

    @property
    def share(self) -> float:
        """Of the documents; of the windows where no end of a document is known."""
        return self.found / self.documents if self.documents else self.windows

    def __str__(self) -> str:
        documents = f"{self.found:,} of {self.documents:,} validation documents and " if self.documents else ""
        return f"{documents}{self.windows:.1%} of the validation windows of {WINDOW} tokens"


def find_overlap(train: Sequence[TokenStream], val: Sequence[TokenStream], eot_id: int | None) -> Overlap:
    """Compare samples of validation streams with samples of training streams; takes a second or two for the largest.

    Args:
        train: training tokens of each source.
        val: validation tokens of each source.
        eot_id: the token that ends a document; None: not known, and then no documents are counted.

    Source: windows of 13 as in Brown et al. 2020 (GPT-3), https://arxiv.org/abs/2005.14165, section 4, for benchmarks.
    """
    hashes, numbers, before = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)], 0
    for block in _blocks(val, "val"):
        ends = np.zeros(len(block), dtype=bool) if eot_id is None else block == eot_id
        number = before + np.cumsum(ends) - ends  # of each token's document
        whole = number[: 1 - WINDOW] == number[WINDOW - 1 :]  # within one document
        hashes.append(window_hashes(block)[whole])
        numbers.append(number[: 1 - WINDOW][whole])
        before = int(number[-1]) + 1
    own, of_document = np.concatenate(hashes), np.concatenate(numbers)
    if not len(own):
        return Overlap(0, 0, 0.0)
    known, place = np.unique(own, return_inverse=True)
    table = np.zeros(1 << _BITS, dtype=bool)
    table[known >> np.uint64(64 - _BITS)] = True
    seen = np.zeros(len(known), dtype=bool)
    for block in _blocks(train, "train"):
        found = window_hashes(block)
        found = found[table[found >> np.uint64(64 - _BITS)]]
        index = np.minimum(np.searchsorted(known, found), len(known) - 1)
        seen[index[known[index] == found]] = True
    matches = seen[place]
    total = np.bincount(of_document, minlength=1)
    shares = np.bincount(of_document, matches)[total > 0] / total[total > 0]
    documents = 0 if eot_id is None else len(shares)
    return Overlap(documents, int((shares >= _FOUND).sum()), float(matches.mean()))


def window_hashes(tokens: NDArray[np.integer]) -> NDArray[np.uint64]:
    """A hash of each window of 13 tokens, by its first one: (n,) to (n - 12,)."""
    mixed = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(tokens) - WINDOW + 1, dtype=np.uint64)
    for place in range(WINDOW):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTOR + mixed[place : place + len(hashes)]
    return (hashes ^ (hashes >> np.uint64(32))) * _FACTOR


def _blocks(streams: Sequence[TokenStream], split: str) -> Iterator[NDArray[np.int64]]:
    """Parts of each stream, spread evenly over it where it is longer than its sample; else all, window by window."""
    block = max(_BLOCK[split] // len(streams), WINDOW)
    for stream in streams:
        sample = SAMPLE[split] // len(streams)
        spread = max((len(stream) - block) // max(sample // block - 1, 1), 1)
        step = spread if len(stream) > sample else block - WINDOW + 1
        for start in range(0, max(len(stream) - WINDOW + 1, 0), step):
            yield stream.read(start, block)
