"""Which documents stand together in a row: worked out by hand, against plain best fit, and as properties."""

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.data import packing
from lightning_tricks.data.packing import best_fit, decode, documents_of_block, encode, number_of_blocks, plan_block


def rows_of(block):
    """The pieces of each row: (start, length, begins a document)."""
    pieces = [decode(piece) for piece in block.pieces.tolist()]
    ends = [*block.firsts.tolist(), len(pieces)]
    return [pieces[a:b] for a, b in pairwise(ends)]


def plan(lengths, seq_len, padding=0):
    lengths = np.array(lengths)
    return plan_block(np.cumsum(lengths) - lengths, lengths, seq_len, padding)


@pytest.mark.parametrize("piece", [(0, 1, 1), (2**44 - 1, 2**19, 0), (12345, 2048, 1)])
def test_a_piece_is_read_as_it_was_written(piece):
    start, length, begins = piece
    (code,) = encode(np.array([start]), np.array([length]), np.array([begins == 1])).tolist()
    assert decode(code) == piece


def test_documents_that_fill_rows_are_not_cut():
    # 5 fits 3, 6 fits 2, and 8 is a row; the order in a row is that of the documents
    block = plan([3, 6, 8, 2, 5], 8)
    assert rows_of(block) == [[(9, 8, 1)], [(3, 6, 1), (17, 2, 1)], [(0, 3, 1), (19, 5, 1)]]
    assert (block.documents, block.short, block.short_cut) == (5, 5, 0)


def test_a_long_document_is_cut_into_rows_and_only_its_first_piece_begins_a_document():
    block = plan([10, 2], 4)
    assert rows_of(block) == [[(0, 4, 1)], [(4, 4, 0)], [(8, 2, 0), (10, 2, 1)]]
    assert (block.documents, block.short, block.short_cut) == (2, 1, 0)


def test_rows_beyond_the_padding_are_joined_and_cut():
    lengths = [6, 6, 7, 0, 6]
    # gaps of 2, 2, 1 and 2: the smallest is kept, the three others are cut at 8 and 16
    block = plan(lengths, 8, padding=2)
    assert rows_of(block) == [[(12, 7, 1)], [(0, 6, 1), (6, 2, 1)], [(8, 4, 0), (19, 4, 1)], [(23, 2, 0)]]
    assert (block.documents, block.short, block.short_cut) == (4, 4, 2)
    assert [len(row) for row in rows_of(plan(lengths, 8, padding=7))] == [1, 1, 1, 1]


def by_single_pieces(lengths, room):
    """Sorted gaps that best-fit decreasing leaves, one piece after the other."""
    gaps = []
    for size in sorted(lengths, reverse=True):
        at = bisect_left(gaps, size)
        insort(gaps, (gaps.pop(at) if at < len(gaps) else room) - size)
    return gaps


@given(st.lists(st.integers(1, 40), max_size=120), st.integers(40, 90))
def test_pieces_handled_together_leave_the_gaps_of_best_fit(lengths, room):
    row, rows = best_fit(np.array(lengths, dtype=np.int64), room)
    used = np.bincount(row, weights=lengths, minlength=rows) if lengths else []
    assert sorted(room - int(tokens) for tokens in used) == by_single_pieces(lengths, room)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 20), st.integers(0, 30))
def test_pieces_tile_the_documents_and_padding_is_within_its_limit(lengths, seq_len, padding):
    block = plan(lengths, seq_len, padding)
    used = [sum(length for _, length, _ in row) for row in rows_of(block)]
    assert max(used, default=0) <= seq_len
    assert seq_len * len(used) - sum(lengths) <= padding + seq_len - 1
    found = sorted(piece for row in rows_of(block) for piece in row)
    begins = np.cumsum(lengths) - lengths
    assert [start for start, _, _ in found] == [0, *np.cumsum([n for _, n, _ in found]).tolist()][: len(found)]
    assert sum(length for _, length, _ in found) == sum(lengths)
    whole = {int(begin) for begin, length in zip(begins, lengths, strict=True) if length}
    assert {start for start, _, first in found if first} == whole
    assert all(first == (start in whole) for start, _, first in found)
    short = [(int(b), n) for b, n in zip(begins, lengths, strict=True) if 0 < n <= seq_len]
    assert block.short == len(short)
    assert block.short_cut == len(set(short) - {(start, length) for start, length, _ in found})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 99))
def test_each_document_is_in_one_block_in_another_order_for_another_key(lengths, blocks, key):
    ends = np.cumsum(lengths)
    found = [pair for n in range(blocks) for pair in zip(*documents_of_block(ends, n, blocks, key), strict=True)]
    assert sorted(found) == sorted(zip(ends - lengths, lengths, strict=True))


def test_the_order_of_documents_depends_on_the_key():
    ends = np.arange(1, 101)
    orders = [documents_of_block(ends, 0, 1, key)[0].tolist() for key in (1, 2)]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_blocks_have_a_fixed_number_of_tokens_but_more_for_rows_that_are_long():
    assert number_of_blocks(10**9, 10**6, 2048) == 10**9 // 2**24
    assert number_of_blocks(10**9, 10**6, 131072) == 10**9 // (800 * 131072)
    assert number_of_blocks(10**9, 7, 2048) == 7
    assert number_of_blocks(100, 7, 2048) == 1


def test_documents_for_which_best_fit_alone_would_pad_much_stay_within_the_slack():
    lengths = np.random.default_rng(0).integers(1030, 1500, 5000)  # no two of them fit a row
    tokens = int(lengths.sum())
    best_fit_rows = best_fit(lengths, 2048)[1]
    block = plan(lengths, 2048, int(packing.SLACK * tokens) - 2047)
    assert best_fit_rows * 2048 / tokens > 1.3
    assert 1 < len(block.firsts) * 2048 / tokens <= 1.005
