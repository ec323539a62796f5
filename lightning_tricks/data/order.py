"""A shuffle without memory: the window of the text that belongs to a sample position.

Position p, an integer counted over the whole run, names the same window whatever the number of workers, of processes
or of restarts. Nothing is stored: the order is a keyed permutation, evaluated for the positions that are asked for.
Samples may be passed over, such as those of a batch that destroyed a run. Those that are left are numbered again
without gaps: a run asks for a sample by that number, its row.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError

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
        key: 64 bits, see `derive_key`.

    Returns:
        Same shape as `index`, int64, values in [0, n).

    Source: Black & Rogaway, Ciphers with Arbitrary Finite Domains, https://eprint.iacr.org/2001/012.
    """
    bits = max(2, (n - 1).bit_length())
    keys = [np.uint64(derive_key(key, number)) for number in range(_ROUNDS)]
    with np.errstate(over="ignore"):
        out = _feistel(np.asarray(index, dtype=np.uint64), bits, keys)
        while (outside := out >= np.uint64(n)).any():
            out = np.where(outside, _feistel(out, bits, keys), out)
    return out.astype(np.int64)


def _feistel(x: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """One pass over [0, 2**bits). With an odd number of bits the halves differ by one and change places each round."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = x >> np.uint64(right_bits), x & np.uint64((1 << right_bits) - 1)
    for key in keys:
        # the finalizer of MurmurHash3, cut to the bits of the other half
        mixed = (right + key) * np.uint64(0xFF51AFD7ED558CCD)
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        mixed ^= mixed >> np.uint64(33)
        left, right = right, left ^ (mixed & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


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


class WindowOrder:
    """The start in the stream of the window that belongs to a sample position.

    The stream is cut into windows of `seq_len` tokens, whose targets reach one token further. Each pass over them
    (epoch) has its own shuffle and its own offset of the cuts in [0, seq_len), so that a second pass does not see the
    same windows again. In one pass no token is a target twice; at most 2 * seq_len - 1 tokens at the ends of the
    stream are not seen.

    Args:
        tokens: length of the stream, more than `seq_len`.
        seq_len: tokens in a window.
        seed: any integer.
        skipped: samples to pass over; with it, windows are asked for by row.
    """

    def __init__(self, tokens: int, seq_len: int, seed: int, skipped: SkippedSamples | None = None) -> None:
        self.seq_len, self.seed, self._skipped = seq_len, seed, skipped
        # one window is given up for the offset, unless it is the only one
        self.windows = max(tokens // seq_len - 1, 1)
        self._offsets = min(seq_len, tokens - self.windows * seq_len)
        if self._offsets < 1:
            raise ValueError(f"{tokens} tokens hold no window of {seq_len} tokens and the token after it")

    def starts(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """First token of each sample position's window: (n,) int64, from which `seq_len + 1` tokens can be read."""
        positions = positions if self._skipped is None else self._skipped.positions(positions)
        epochs, inside = np.divmod(np.asarray(positions, dtype=np.int64), self.windows)
        out = np.empty_like(inside)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            window = permute(inside[rows], self.windows, derive_key(self.seed, int(epoch)))
            offset = derive_key(self.seed, int(epoch), 1) % self._offsets
            out[rows] = window * self.seq_len + offset
        return out
