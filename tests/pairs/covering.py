"""Few rows of settings in which each three settings meet at least once, without the pairs that are known to be refused.

A defect needs two or three conditions at once far more often than four (Kuhn et al. 2004, Software fault interactions,
https://doi.org/10.1109/TSE.2004.24), so some forty rows stand for the thousands of all combinations.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Setting = tuple[str, Any]  # (factor, level)

CANDIDATES = 12  # rows built for each that is kept


def is_allowed(row: Mapping[str, Any], forbidden: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no forbidden combination is a part of the row."""
    return not any(all(row.get(factor) == level for factor, level in one.items()) for one in forbidden)


def combinations_to_cover(
    factors: Mapping[str, Sequence[Any]], forbidden: Sequence[Mapping[str, Any]], strength: int
) -> set[frozenset[Setting]]:
    """Each allowed combination of `strength` settings of different factors."""
    found = set()
    for names in combinations(factors, strength):
        rows: list[Row] = [{}]
        for name in names:
            rows = [{**row, name: level} for row in rows for level in factors[name]]
        found |= {frozenset(row.items()) for row in rows if is_allowed(row, forbidden)}
    return found


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    forbidden: Sequence[Mapping[str, Any]] = (),
    strength: int = 3,
    given: Sequence[Row] = (),
    seed: int = 0,
) -> list[Row]:
    """Rows that hold each allowed combination of `strength` settings; the same ones in each process.

    Each row begins with a combination that is still missing, and takes for each other factor, in random order, the
    level that adds most of those that are missing; of some such rows the best is kept (Cohen et al. 1997, AETG,
    https://doi.org/10.1109/32.605761).

    Args:
        factors: the levels of each factor. The first is allowed beside every other setting.
        forbidden: combinations that no row may hold.
        strength: number of settings that must meet.
        given: rows that are there already; those returned hold what is missing in them.
        seed: other rows that hold the same for another one.
    """
    draw = random.Random(seed)
    # a setting is a bit, and a combination the sum of its settings
    bit = {setting: 1 << number for number, setting in enumerate(_settings(factors))}
    missing = {sum(map(bit.get, one)) for one in combinations_to_cover(factors, forbidden, strength)}
    for row in given:
        missing -= _held([bit.get(setting, 0) for setting in row.items()], strength)
    rows: list[Row] = []
    while missing:
        combination = min(missing)
        first = {factor: level for (factor, level), own in bit.items() if own & combination}
        candidates = [_candidate(first, factors, forbidden, strength, missing, bit, draw) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(missing & _held(map(bit.get, row.items()), strength)))
        missing -= _held(map(bit.get, best.items()), strength)
        rows.append({factor: best[factor] for factor in factors})
    return rows


def _settings(factors: Mapping[str, Sequence[Any]]) -> list[Setting]:
    return [(factor, level) for factor, levels in factors.items() for level in levels]


def _held(bits: Iterable[int], strength: int) -> set[int]:
    return set(map(sum, combinations(bits, strength)))


def _candidate(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    forbidden: Sequence[Mapping[str, Any]],
    strength: int,
    missing: set[int],
    bit: Mapping[Setting, int],
    draw: random.Random,
) -> Row:
    row = dict(row)
    rest = [factor for factor in factors if factor not in row]
    draw.shuffle(rest)
    for factor in rest:
        others = _held([bit[setting] for setting in row.items()], strength - 1)
        levels = [level for level in factors[factor] if is_allowed({**row, factor: level}, forbidden)]
        draw.shuffle(levels)
        adds = {level: len(missing.intersection(map(bit[factor, level].__add__, others))) for level in levels}
        row[factor] = max(levels, key=adds.__getitem__)
    return row
