"""Pass over samples of the training stream by their position, such as those of a batch that destroyed a run.

The samples that are left are numbered again without gaps: a run asks for a sample by that number, its index.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._errors import UsageError
from lightning_tricks.data.order import WindowOrder


class SkippedSamples:
    """Which sample positions the stream passes over, and the arithmetic between positions and indices.

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
        # the index that the first position after range k has
        self._indices = np.array([first for first, _ in merged], dtype=np.int64) - self._before[:-1]

    def positions(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Position of the sample with each index: (n,) int64."""
        indices = np.asarray(indices, dtype=np.int64)
        return indices + self._before[np.searchsorted(self._indices, indices, side="right")]

    def index(self, position: int) -> int:
        """Index of the first sample from `position` on that is not passed over."""
        return position - sum(min(position, last + 1) - first for first, last in self.ranges if first < position)

    def runs(self, first_index: int, samples: int) -> list[tuple[int, int]]:
        """First and last position of each unbroken run among `samples` samples from an index on."""
        end_index = first_index + samples - 1
        if not self.ranges:  # asked at every step, and NumPy takes a tenth of a millisecond
            return [(first_index, end_index)]
        first, end = self.positions(np.array([first_index, end_index])).tolist()
        runs = []
        for start, last in self.ranges:
            if first < start <= end:
                runs.append((first, start - 1))
                first = last + 1
        return [*runs, (first, end)]


class SkippingOrder:
    """A WindowOrder that is asked by index, past the skipped samples."""

    def __init__(self, order: WindowOrder, skipped: SkippedSamples) -> None:
        self.order, self.skipped, self.seq_len = order, skipped, order.seq_len

    def starts(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """First token of the window of each index, see `WindowOrder.starts`."""
        return self.order.starts(self.skipped.positions(indices))


def _pair(given: Sequence[int]) -> tuple[int, int]:
    pair = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(pair) != 2 or not all(type(number) is int for number in pair) or not 0 <= pair[0] <= pair[1]:
        raise UsageError(f"skip_samples: {given!r} is no range of sample positions; give [first, last], from 0 on")
    return pair[0], pair[1]
