"""A shuffle without memory: the row of tokens that belongs to a sample position.

Position p, an integer counted over the whole run, names the same row whatever the number of workers, of processes
or of restarts. Nothing is stored: the order is a keyed permutation, evaluated for the positions that are asked for.
Samples may be passed over, such as those of a batch that destroyed a run. Those that are left are numbered again
without gaps: a run asks for a sample by that number, its row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError

if TYPE_CHECKING:
    from lightning_tricks.data.mixture import Mixture

_ROUNDS = 4


def derive_key(*parts: int) -> int:
    """64-bit key from integers; any change of any part gives an unrelated key."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(index: NDArray[np.integer], n: int, key: int) -> NDArray[np.int64]:
    """The image of each index under a keyed shuffle of 0..n-1: a bijection for every n and key.

    A four-round Feistel network over the smallest power of two that holds n; values that fall outside are sent through
    it again until they are inside ("cycle walking"), less than once on average.

    Args:
        index: any shape, values in [0, n).
        n: size of the domain, at least 1.
        key: 64 bits; each key gives another order.

    Returns:
        Same shape as `index`, int64, values in [0, n).

    Source: Black & Rogaway, Ciphers with Arbitrary Finite Domains, https://eprint.iacr.org/2001/012.
    """
    flat = np.asarray(index).reshape(-1)
    keys = np.array(_round_keys(key), dtype=np.uint64)[:, None]
    sizes, bits = (np.full(len(flat), number, dtype=np.uint64) for number in (n, _bits(n)))
    return _permute(flat, sizes, bits, np.broadcast_to(keys, (_ROUNDS, len(flat)))).reshape(np.shape(index))


def _round_keys(key: int) -> list[int]:
    return [derive_key(key, number) for number in range(_ROUNDS)]


def _bits(n: int) -> int:
    return max(2, (n - 1).bit_length())


def _permute(
    index: NDArray[np.integer], n: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """`permute` with a domain (size, and bits of the power of two) and keys (rounds, n) for each index."""
    out = _feistel(index.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(out >= n)
    while len(outside):
        out[outside] = _feistel(out[outside], bits[outside], keys[:, outside])
        outside = outside[out[outside] >= n[outside]]
    return out.astype(np.int64)


def _feistel(x: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass over [0, 2**bits). With an odd number of bits the halves differ by one and change places each round."""
    one = np.uint64(1)
    left_bits = bits >> one
    right_bits = bits - left_bits
    left, right = x >> right_bits, x & ((one << right_bits) - one)
    for key in keys:
        # the finalizer of MurmurHash3, cut to the bits of the other half
        mixed = (right + key) * np.uint64(0xFF51AFD7ED558CCD)
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        mixed ^= mixed >> np.uint64(33)
        left, right = right, left ^ (mixed & ((one << left_bits) - one))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


class SkippedSamples:
    """Which sample positions the stream passes over, and the arithmetic between positions and rows.

    Args:
        ranges: first and last position of each range, both passed over; in any order, they may overlap. None for none.

    Raises:
        UsageError: a range is not a pair of whole numbers from 0 on, the first not above the last.
    """

    def __init__(self, ranges: Sequence[Sequence[int]] | None) -> None:
        merged: list[list[int]] = []
        for first, last in sorted(map(_pair, ranges or ())):
            if merged and first <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], last)
            else:
                merged.append([first, last])
        self.ranges = [(first, last) for first, last in merged]
        lengths = [last - first + 1 for first, last in merged]
        self._before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # passed over before range k
        # the row that the first position after range k has
        self._rows = np.array([first for first, _ in merged], dtype=np.int64) - self._before[:-1]

    def positions(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Position of the sample of each row: (n,) int64."""
        rows = np.asarray(rows, dtype=np.int64)
        return rows + self._before[np.searchsorted(self._rows, rows, side="right")]

    def row(self, position: int) -> int:
        """Row of the first sample from `position` on that is not passed over."""
        return position - sum(min(position, last + 1) - first for first, last in self.ranges if first < position)

    def runs(self, first_row: int, samples: int) -> list[tuple[int, int]]:
        """First and last position of each unbroken run among `samples` samples from a row on."""
        last_row = first_row + samples - 1
        if not self.ranges:  # asked at every step, and NumPy takes a tenth of a millisecond
            return [(first_row, last_row)]
        first, end = self.positions(np.array([first_row, last_row])).tolist()
        runs = []
        for start, last in self.ranges:
            if first < start <= end:
                runs.append((first, start - 1))
                first = last + 1
        return [*runs, (first, end)]


def _pair(given: Sequence[int]) -> tuple[int, int]:
    pair = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(pair) != 2 or not all(type(number) is int for number in pair) or not 0 <= pair[0] <= pair[1]:
        raise UsageError(f"skip_samples: {given!r} is no range of sample positions; give [first, last], from 0 on")
    return pair[0], pair[1]


@dataclass(frozen=True)
class Pass:
    """The rows of a source, each of which a pass over it (epoch) has once, in an order of its own.

    In epoch e, row r has the address `r * step + shift + e * per_epoch`; the shift in [0, shifts) is drawn by epoch.
    """

    rows: int
    step: int
    shifts: int
    seed: int  # of the order
    per_epoch: int = 0  # for rows that differ by epoch


def windows(tokens: int, seq_len: int, seed: int) -> Pass:
    """A stream cut into windows of `seq_len` tokens, whose targets reach one token further; addresses are offsets.

    Each epoch shifts the cuts, so that a second pass does not see the same windows again. In one pass no token is a
    target twice; at most 2 * seq_len - 1 tokens at the ends of the stream are not seen.

    Args:
        tokens: length of the stream, more than `seq_len`.
        seq_len: tokens in a window.
        seed: any integer.
    """
    if tokens <= seq_len:
        raise ValueError(f"{tokens} tokens hold no window of {seq_len} tokens and the token after it")
    # one window is given up for the shift, unless it is the only one
    rows = max(tokens // seq_len - 1, 1)
    return Pass(rows, seq_len, min(seq_len, tokens - rows * seq_len), seed)


class RowOrder:
    """Source and address of the row that belongs to a sample position.

    Args:
        passes: of each source.
        mixture: of the sources, by their number; None for a single one.
        skipped: samples to pass over; with it, rows are asked for in place of positions.
    """

    def __init__(
        self, passes: Sequence[Pass], mixture: "Mixture | None" = None, skipped: SkippedSamples | None = None
    ) -> None:
        self.passes, self._mixture, self._skipped = list(passes), mixture, skipped
        self._rows = np.array([each.rows for each in passes], dtype=np.int64)
        self._bits = np.array([_bits(each.rows) for each in passes], dtype=np.uint64)
        self._steps = np.array([each.step for each in passes], dtype=np.int64)

    @property
    def rows_in_pass(self) -> int:
        """Rows of a pass over all sources."""
        return int(self._rows.sum())

    def places(self, positions: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of the source of each sample position, and the row's address in it: (n,) int64 both."""
        where = np.asarray(positions, dtype=np.int64)
        if self._skipped is not None:
            where = self._skipped.positions(where)
        source, index = np.zeros_like(where), where
        if self._mixture is not None:
            source, index = self._mixture.rows(where)
        epoch, inside = np.divmod(index, self._rows[source])
        several = len(self.passes)
        known, which = np.unique(epoch * several + source, return_inverse=True)
        numbers = [_epoch_numbers(self.passes[pair % several], pair // several) for pair in known.tolist()]
        keys = np.array(numbers, dtype=np.uint64)[which].T
        rows = _permute(inside, self._rows[source].astype(np.uint64), self._bits[source], keys[:_ROUNDS])
        return source, rows * self._steps[source] + keys[_ROUNDS].astype(np.int64)


@lru_cache(maxsize=4096)
def _epoch_numbers(rows: Pass, epoch: int) -> tuple[int, ...]:
    """The keys of the rounds, and the number to add to addresses."""
    shift = derive_key(rows.seed, epoch, 1) % rows.shifts
    return (*_round_keys(derive_key(rows.seed, epoch)), shift + epoch * rows.per_epoch)
