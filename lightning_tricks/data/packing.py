"""Best-fit packing: whole documents side by side in rows of a fixed length, instead of one stream cut every T tokens.

The documents are taken in a keyed random order and split into blocks of about 2**24 tokens, which are planned one by
one: memory does not grow with the text, and the blocks may be planned in any order. In a block

1. a document longer than T gives full pieces of T tokens, each a row of its own, and what is left over;
2. what is left over and all shorter documents are packed by best fit, the longest first;
3. rows with the smallest gaps are kept as long as the padding stays within its limit. The pieces of the other rows are
   laid one after the other and cut every T tokens.

So every token is in one piece, and padding is at most SLACK of the tokens, or one row where the text is short.

Source: best-fit decreasing for documents, Ding et al., Fewer Truncations Improve Language Modeling,
https://arxiv.org/abs/2404.10830.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_tricks.data.order import permute
from lightning_tricks.data.shards import extents

BLOCK_TOKENS = 1 << 24
SLACK = 0.005  # padding, as a share of the tokens
LENGTH_BITS = 19  # of a piece in 64 bits: 44 for its start, one for "begins a document", and these for its length - 1
MAX_SEQ_LEN = 1 << LENGTH_BITS


class Block(NamedTuple):
    """The planned rows of one block."""

    pieces: NDArray[np.uint64]  # in the order of the rows, see `encode`
    firsts: NDArray[np.int64]  # of each row, the index of its first piece
    documents: int
    short: int  # documents of at most T tokens
    short_cut: int  # those of them that are in more than one piece


def encode(starts: NDArray[np.int64], lengths: ArrayLike, begins: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Pieces as 64-bit numbers: offset of the first token, whether it begins a document, and number of tokens."""
    code = (starts.astype(np.uint64) << np.uint64(1)) | begins.astype(np.uint64)
    return (code << np.uint64(LENGTH_BITS)) | (np.asarray(lengths) - 1).astype(np.uint64)


def decode(piece: int) -> tuple[int, int, int]:
    """Offset of the first token, number of tokens, and 1 if the first token begins a document, else 0."""
    return piece >> (LENGTH_BITS + 1), (piece & (MAX_SEQ_LEN - 1)) + 1, piece >> LENGTH_BITS & 1


def number_of_blocks(tokens: int, documents: int, seq_len: int) -> int:
    """So many that the documents of a block have `BLOCK_TOKENS` in the mean, and its last row does not matter."""
    return max(min(tokens // max(BLOCK_TOKENS, int(4 * seq_len / SLACK)), documents), 1)


def documents_of_block(
    ends: NDArray[np.integer], block: int, blocks: int, key: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offset of the first token, and number of tokens, of each document in a block.

    Args:
        ends: (documents,) offset after the last token of each document, ascending; it may be a mapped file.
        block: number of the block, from 0 on.
        blocks: their number; each has the same number of documents, give or take one.
        key: of the order of the documents, see `derive_key`.
    """
    bounds = [len(ends) * number // blocks for number in (block, block + 1)]
    return extents(ends, permute(np.arange(*bounds), len(ends), key))


def plan_block(starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int, padding: int) -> Block:
    """Pack documents into rows of `seq_len` tokens; see the top of this file.

    Args:
        starts: (n,) offset of the first token of each document.
        lengths: (n,) tokens of each document; a document without tokens gives no piece.
        seq_len: T, at most MAX_SEQ_LEN.
        padding: tokens that may be padded in all rows together, beside those of one row.
    """
    documents, short = int((lengths > 0).sum()), int(((lengths > 0) & (lengths <= seq_len)).sum())
    full, lengths = np.divmod(lengths, seq_len)
    nth = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)  # number of a full piece in its document
    alone = encode(np.repeat(starts, full) + nth * seq_len, seq_len, nth == 0)

    left = np.flatnonzero(lengths)
    starts, lengths, begins = (starts + full * seq_len)[left], lengths[left], full[left] == 0
    row, rows = best_fit(lengths, seq_len)
    gaps = seq_len - np.bincount(row, weights=lengths, minlength=rows).astype(np.int64)
    by_gap = np.argsort(gaps, kind="stable")
    kept = np.zeros(rows, dtype=bool)
    kept[by_gap[np.cumsum(gaps[by_gap]) <= padding]] = True
    fits = kept[row]
    packed, packed_row = encode(starts[fits], lengths[fits], begins[fits]), (np.cumsum(kept) - 1)[row[fits]]

    starts, begins = starts[~fits], begins[~fits]
    document, offsets, cut_lengths, cut_row = _cut(lengths[~fits], seq_len)
    cut = encode(starts[document] + offsets, cut_lengths, begins[document] & (offsets == 0))
    short_cut = int((begins & (np.bincount(document, minlength=len(begins)) > 1)).sum())

    pieces = np.concatenate([alone, packed, cut])
    row = np.concatenate([np.arange(len(alone)), packed_row + len(alone), cut_row + len(alone) + kept.sum()])
    order = np.argsort(row, kind="stable")  # pieces of a row stay in the random order of their documents
    return Block(pieces[order], np.flatnonzero(np.diff(row[order], prepend=-1)), documents, short, short_cut)


def best_fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], int]:
    """The row of each piece, and the number of rows: the longest piece first, each into the smallest gap that holds it.

    Pieces of the same length and rows with the same gap are handled together.

    Args:
        lengths: (n,) from 1 to `room`.
        room: tokens in a row.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    gaps, rows_with, rows = list[int](), defaultdict[int, list[int]](list), 0
    found = list[int]()  # row of each piece, in the order of their lengths
    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            at = bisect_left(gaps, size)
            if at == len(gaps):
                gaps.append(room)
                rows_with[room] = list(range(rows, rows := rows + max(left // (room // size), 1)))
            gap = gaps[at]
            each = min(gap // size, left)  # once a row has a piece, its own gap is the smallest that holds the next
            used = rows_with[gap][-(left // each) :]
            del rows_with[gap][-len(used) :]
            if not rows_with[gap]:
                del gaps[at]
            found += used * each
            left -= len(used) * each
            if rest := gap - size * each:
                if not rows_with[rest]:
                    insort(gaps, rest)
                rows_with[rest] += used
    out = np.empty(len(lengths), dtype=np.int64)
    out[np.argsort(-lengths, kind="stable")] = found
    return out, rows


def _cut(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], ...]:
    """Documents one after the other, cut every `seq_len` tokens: document, offset, length and row of each piece."""
    begins = np.cumsum(lengths) - lengths
    edges = np.union1d(begins, np.arange(0, lengths.sum(), seq_len))
    document = np.searchsorted(begins, edges, side="right") - 1
    return document, edges - begins[document], np.diff(edges, append=lengths.sum()), edges // seq_len
