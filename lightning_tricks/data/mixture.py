"""Mixtures: position in the run -> source, and index in that source's own endless order. No table, no carried state.

A binary tree stands over the sources. At a node of weight s, whose lighter child has weight a, the rows are cut into
windows of s / a rows; each window holds one row of the lighter child, at a place drawn by hash. So the rows of either
child before row n follow from n alone, and with them the index in the child, down to the sources.

The number of rows of a source differs from its share of the rows before any position by less than `Mixture.bound`.
Weights are whole millionths, so that all of it is exact in 64 bits up to row 2**42.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks.data.order import derive_key

UNIT = 1_000_000  # sum of the weights of a segment
LAST = 1 << 42  # position after the last one

Tree = int | tuple["Tree", "Tree"]  # a source, or a lighter and a heavier part


def whole_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights in millionths of their sum, by largest remainders; a positive one is at least 1."""
    total = sum(weights.values())
    exact = {name: weight * UNIT / total for name, weight in weights.items()}
    whole = {name: max(int(weight), 1) if weight > 0 else 0 for name, weight in exact.items()}
    missing = UNIT - sum(whole.values())
    if missing < 0:  # many tiny weights were raised to 1
        whole[max(whole, key=whole.__getitem__)] += missing
        return whole
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:missing]:
        whole[name] += 1
    return whole


def tree_bound(tree: Tree, weights: Sequence[int]) -> float:
    """1 + the largest w * (1/W1 + 1/W2 + ...) of its sources, W being the weights of the nodes between root and source.

    By that many rows may the number of a source's rows differ from its share.
    """

    def visit(node: Tree, above: float) -> tuple[int, float]:
        if isinstance(node, int):
            return weights[node], weights[node] * above
        weight = _weight(node, weights)
        inside = above + (0 if node is tree else 1 / weight)
        return weight, max(visit(child, inside)[1] for child in node)

    return 1 + visit(tree, 0.0)[1]


def _weight(node: Tree, weights: Sequence[int]) -> int:
    return weights[node] if isinstance(node, int) else sum(_weight(child, weights) for child in node)


def best_tree(weights: Sequence[int]) -> Tree:
    """The tree that halves the weight again and again; weights above 0 have a leaf."""
    return _halved([source for source, weight in enumerate(weights) if weight], weights)


def _halved(sources: Sequence[int], weights: Sequence[int]) -> Tree:
    if len(sources) == 1:
        return sources[0]
    sides: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for source in sorted(sources, key=lambda source: -weights[source]):
        side = int(sums[1] < sums[0])
        sides[side].append(source)
        sums[side] += weights[source]
    return _halved(sides[0], weights), _halved(sides[1], weights)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, https://prng.di.unimi.it/splitmix64.c."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Segment:
    """The rows from a position on, under one set of weights, until the next segment.

    Args:
        position: of its first row.
        weights: whole, by source, of the sum UNIT.
        key: 64 bits; decides where in its window a row of a lighter child stands.
        before: rows of each source before the position.
        ahead: rows of each source before the position, less its share of them, in millionths of a row. The windows of
            the tree are shifted by it, so that differences of earlier segments are made up for and do not add up.
    """

    def __init__(
        self, position: int, weights: Sequence[int], key: int, before: Sequence[int], ahead: Sequence[int]
    ) -> None:
        self.position, self.weights, self.key = position, list(weights), np.uint64(key)
        self.before = np.array(before, dtype=np.int64)
        tree = best_tree(self.weights)
        self.bound = tree_bound(tree, self.weights)
        left_over = sum(lead for lead, weight in zip(ahead, weights, strict=True) if not weight)
        self._ahead = [
            lead + left_over * weight // UNIT if weight else 0 for lead, weight in zip(ahead, weights, strict=True)
        ]
        self._nodes: list[tuple[int, int, int, int, int]] = []  # lighter weight, weight, shift, lighter and other child
        self._paths: dict[int, list[tuple[int, bool]]] = {}  # of a source: its nodes, and whether it is in the lighter
        self._root = self._add(tree, [])[0]
        self._table = np.array(self._nodes, dtype=np.int64).reshape(-1, 5).T

    def _add(self, tree: Tree, path: list[tuple[int, bool]]) -> tuple[int, int, int]:
        """Number (of a source: ~source), weight and lead of a node."""
        if isinstance(tree, int):
            self._paths[tree] = path
            return ~tree, self.weights[tree], self._ahead[tree]
        number = len(self._nodes)
        self._nodes.append((0, 0, 0, 0, 0))
        children = sorted(tree, key=lambda child: _weight(child, self.weights))
        minor, major = (
            self._add(child, [*path, (number, lighter)]) for child, lighter in zip(children, (True, False), strict=True)
        )
        weight, lead = minor[1] + major[1], minor[2] + major[2]
        shift = round((minor[2] * weight - minor[1] * lead) / UNIT)
        self._nodes[number] = (minor[1], weight, shift, minor[0], major[0])
        return number, weight, lead

    def _minor_before(
        self, node: NDArray[np.int64], n: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of the lighter child before row n of a node, and before row n + 1."""
        minor, weight, shift = self._table[:3, node]
        window = (minor * n - shift) // weight
        first = -((-window * weight - shift) // minor)
        stop = -((-(window + 1) * weight - shift) // minor)
        seed = _mixed(self.key + node.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        drawn = _mixed(seed ^ (window.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03))) >> np.uint64(32)
        place = first + ((drawn.astype(np.int64) * (stop - first)) >> 32)
        return np.clip(window + (n > place), 0, n), np.clip(window + (n >= place), 0, n + 1)

    def rows(self, n: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each row, counted from the segment's first, and its index in the source's order."""
        source, index = np.empty_like(n), np.empty_like(n)
        left, node = np.arange(len(n)), np.full(len(n), self._root, dtype=np.int64)
        while len(left):
            inner = node >= 0
            if not inner.all():
                leaf = ~inner
                source[left[leaf]], index[left[leaf]] = ~node[leaf], n[leaf]
                left, node, n = left[inner], node[inner], n[inner]
                continue
            before, after = self._minor_before(node, n)
            is_minor = after > before
            n = np.where(is_minor, before, n - before)
            node = np.where(is_minor, self._table[3, node], self._table[4, node])
        return source, index + self.before[source]

    def counts(self, n: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of each source before row n, counted from the segment's first: n and the result have one a source."""
        n = np.where(np.array(self.weights) > 0, n, 0)
        for depth in range(max(map(len, self._paths.values()))):
            sources = np.array([source for source, path in self._paths.items() if len(path) > depth])
            node, lighter = np.array([self._paths[source][depth] for source in sources.tolist()]).T
            before, _ = self._minor_before(node, n[sources])
            n[sources] = np.where(lighter, before, n[sources] - before)
        return n

    def rows_by_share(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rows of the segment after which each source should have so many."""
        return (counts * float(UNIT) + np.array(self._ahead)) / np.maximum(self.weights, 1)

    def ahead(self, rows: int, counts: Sequence[int]) -> list[int]:
        """The lead of each source after so many rows."""
        parts = zip(self._ahead, counts, self.weights, strict=True)
        return [lead + UNIT * count - rows * weight for lead, count, weight in parts]


@dataclass(frozen=True)
class Stage:
    """Weights from a position on, of any sum above 0."""

    position: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Resolved:
    """A segment as a checkpoint has it."""

    position: int
    weights: dict[str, int]
    seed: int


class Mixture:
    """Which source each row of a run comes from: segments one after the other, through stages and ends of sources.

    A run that goes on from a checkpoint keeps the segments that have begun. If its own weights are others, a segment
    begins where it goes on: no row of any source comes again or is left out.

    Args:
        stages: weights, the first ones from position 0 on.
        rows: that a source has until it ends, by its name; sources without an end are left out.
        seed: of the places in windows.
        past: segments of the runs before; those that begin at `since` or later are not used.
        since: position at which this run goes on.

    Attributes:
        names: of the sources by their number, also those that only earlier segments have.
        bound: number of rows by which a source's may differ from its share, up to any position.
        end: position at which all sources have ended; None without an end.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        rows: Mapping[str, int],
        seed: int,
        past: Sequence[Resolved] = (),
        since: int = 0,
    ) -> None:
        past = [segment for segment in past if segment.position < since]
        self.names = list(dict.fromkeys(chain(*(stage.weights for stage in stages), *(s.weights for s in past))))
        self.end: int | None = None
        self._segments: list[Segment] = []
        self._resolved: list[Resolved] = []
        for segment in past:
            self._begin(segment)
        self._limits = np.array([rows.get(name, LAST) for name in self.names], dtype=np.int64)
        stages = sorted(stages, key=lambda stage: stage.position)
        first = max([n for n, stage in enumerate(stages) if stage.position <= since], default=0)
        for number, stage in enumerate(stages[first:], start=first):
            stop = stages[number + 1].position if number + 1 < len(stages) else LAST
            self._add_stage(stage.weights, max(stage.position, since), stop, seed)
        self._starts = np.array([segment.position for segment in self._segments], dtype=np.int64)
        # the lead of a source is made up for with the next rows, in another tree: of random changes, 21 added 3 rows
        self.bound = max(segment.bound for segment in self._segments) + len(self._segments) - 1

    def _begin(self, resolved: Resolved) -> None:
        """Add a segment after those there are."""
        weights = [resolved.weights.get(name, 0) for name in self.names]
        before, ahead = [0] * len(self.names), [0] * len(self.names)
        if self._segments:
            last = self._segments[-1]
            rows = resolved.position - last.position
            counts = last.counts(np.full(len(self.names), rows))
            before, ahead = (last.before + counts).tolist(), last.ahead(rows, counts.tolist())
        key = derive_key(resolved.seed, resolved.position)  # not by its number: an added segment changes no other
        self._segments.append(Segment(resolved.position, weights, key, before, ahead))
        self._resolved.append(resolved)

    def _add_stage(self, weights: Mapping[str, float], position: int, stop: int, seed: int) -> None:
        """Add the segments of one stage: a new one begins where a source ends."""
        while position < stop and self.end is None:
            counts = self._counts(position)
            is_open = [count < limit for count, limit in zip(counts, self._limits.tolist(), strict=True)]
            left = {name: weights.get(name, 0) if open_ else 0 for name, open_ in zip(self.names, is_open, strict=True)}
            if not any(left.values()):
                self.end = position
                return
            whole = {name: weight for name, weight in whole_weights(left).items() if weight}
            if not self._resolved or self._resolved[-1].weights != whole:
                self._begin(Resolved(position, whole, seed))
            position = min(self._first_end(position), stop)

    def _first_end(self, position: int) -> int:
        """The first position after `position` at which a source of the last segment has all its rows behind it."""
        segment = self._segments[-1]
        ending = (np.array(segment.weights) > 0) & (self._limits < LAST)
        if not ending.any():
            return LAST
        # by its share, a source ends here, but for `bound` rows; bisected for all sources at once
        weights, rows = np.maximum(segment.weights, 1), self._limits - segment.before
        near, around = segment.rows_by_share(rows), (segment.bound + 1 + len(self._segments)) * UNIT / weights
        last = LAST - segment.position
        low = np.clip(near - around, position + 1 - segment.position, last).astype(np.int64)
        high = np.where(ending, np.clip(near + around, low, last), low).astype(np.int64)
        while (low < high).any():
            middle = (low + high) // 2
            over = segment.before + segment.counts(middle) >= self._limits
            low, high = np.where(over | ~ending, low, middle + 1), np.where(over & ending, middle, high)
        return segment.position + int(low[ending].min())

    def _counts(self, position: int) -> list[int]:
        segments = [segment for segment in self._segments if segment.position <= position]
        if not segments:
            return [0] * len(self.names)
        last = segments[-1]
        return (last.before + last.counts(np.full(len(self.names), position - last.position))).tolist()

    def counts(self, position: int) -> dict[str, int]:
        """Rows of each source before a position."""
        return dict(zip(self.names, self._counts(position), strict=True))

    def rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of the source of each position, and the index in the source's order: (n,) int64 both."""
        which = np.searchsorted(self._starts, positions, side="right") - 1
        if len(which) and (which == which[0]).all():
            segment = self._segments[which[0]]
            return segment.rows(positions - segment.position)
        source, index = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(which).tolist():
            chosen, segment = which == number, self._segments[number]
            source[chosen], index[chosen] = segment.rows(positions[chosen] - segment.position)
        return source, index

    def segments(self) -> list[Resolved]:
        """All segments, those to come too."""
        return list(self._resolved)

    def state(self) -> list[dict[str, Any]]:
        """The segments in plain types, for a checkpoint."""
        return [asdict(segment) for segment in self._resolved]

    @staticmethod
    def of_state(state: Sequence[Mapping[str, Any]]) -> list[Resolved]:
        """The segments in a checkpoint."""
        return [Resolved(**segment) for segment in state]
