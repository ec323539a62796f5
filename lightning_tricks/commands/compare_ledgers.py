"""Compare two ledgers step by step, and find the first thing that differs."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_tricks.monitors.run_ledger.ledger_file import Ledger

# In the order of cause and effect within a step, so that the first one that differs is the cause of the others.
PARTS = ("samples", "batch", "torch_random", "other_random", "loss", "weights")
NAMES = {"torch_random": "random state of torch", "other_random": "random state of NumPy and Python"}
MEANINGS = {
    "samples": "the runs took other samples: another global batch size, skip_samples, data or resume point",
    "batch": "the batches have other values, or the same rows in another order",
    "torch_random": "another seed, or more or fewer random numbers drawn",
    "other_random": "another seed or none, or more or fewer random numbers drawn: see --seed_everything",
    "loss": "from equal data and random state: other weights before the step, other code, or a device that computes "
    "otherwise",
    "weights": "from an equal loss: another gradient, optimizer or learning rate, or a weight that was changed",
}
_SPLIT = ("processes", "data_ranks", "micro_batches")


@dataclass
class Part:
    """The result of comparing one part over all steps.

    Attributes:
        equal: number of steps at which it is equal to the bit.
        near: number of steps at which it is equal within the tolerance.
        not_compared: number of steps by reason.
        differs: first step at which it differs, and where.
    """

    equal: int = 0
    near: int = 0
    not_compared: Counter[str] = field(default_factory=Counter)
    differs: tuple[int, str] | None = None

    def line(self, tolerance: float) -> str:
        """The part's line, without its name."""
        words = []
        if self.differs is not None:
            step, where = self.differs
            words.append(f"differs first at step {step}{where}")
        if self.equal:
            words.append(f"equal at {_steps(self.equal)}")
        if self.near:
            words.append(f"within {tolerance:g} at {_steps(self.near)}")
        words += [f"not compared at {_steps(number)} ({reason})" for reason, number in self.not_compared.items()]
        return "; ".join(words)


@dataclass
class Comparison:
    """Two ledgers side by side.

    Attributes:
        steps: numbers of the steps that both have.
        settings: the settings that differ at the first of these steps, as text.
        first_weights: first start that both have and that begins with different weights; None without one.
        parts: the result for each of PARTS.
        tolerance: relative, for losses that are not expected to be equal to the bit.
    """

    steps: list[int]
    settings: list[str]
    first_weights: int | None
    parts: dict[str, Part]
    tolerance: float

    def first(self) -> tuple[int, list[str]] | None:
        """The first step with a difference, and the parts that differ first there, in their order."""
        found = [(part.differs[0], name) for name, part in self.parts.items() if part.differs is not None]
        if not found:
            return None
        step = min(step for step, _ in found)
        return step, [name for at, name in found if at == step]

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"compared: {len(self.steps)} steps, from {self.steps[0]} to {self.steps[-1]}"
        if self.settings:
            yield f"settings that differ: {'; '.join(self.settings)}"
        for name, part in self.parts.items():
            yield f"{NAMES.get(name, name)}: {part.line(self.tolerance)}"
        first = self.first()
        if self.first_weights is not None and (first is None or self.first_weights <= first[0]):
            yield f"ledger diff: the first difference is in the weights with which step {self.first_weights} begins"
        elif first is not None:
            step, (cause, *others) = first
            also = f"; {', '.join(NAMES.get(name, name) for name in others)} too" if others else ""
            yield f"ledger diff: the first difference is at step {step}, in {NAMES.get(cause, cause)}{also}"
            yield f"  {MEANINGS[cause]}"
        else:
            yield "ledger diff: no difference" + ("" if self._all_equal() else " in what was compared")

    def _all_equal(self) -> bool:
        return all(part.equal == len(self.steps) for part in self.parts.values())

    @property
    def differs(self) -> bool:
        """Whether any part that was compared differs."""
        return self.first() is not None or self.first_weights is not None


def compare(one: Ledger, other: Ledger, tolerance: float) -> Comparison:
    """Compare the steps that two ledgers share, of which there must be one.

    Args:
        one: a ledger.
        other: another one.
        tolerance: relative difference of losses that rounding may explain, between runs that were split in different
            ways over processes, micro-batches or a strategy.
    """
    steps = sorted(one.steps.keys() & other.steps.keys())
    pairs = [(one.steps[step], other.steps[step]) for step in steps]
    first = [ledger.steps[steps[0]]["start"] for ledger in (one, other)]
    settings = [
        f"{name} {first[0].get(name)} and {first[1].get(name)}"
        for name in first[0]
        if name not in ("start", "weights") and first[0].get(name) != first[1].get(name)
    ]
    starts = [{line["start"]: line["weights"] for line in ledger.starts} for ledger in (one, other)]
    shared = sorted(
        step for step in starts[0].keys() & starts[1].keys() if None not in (starts[0][step], starts[1][step])
    )
    first_weights = next((step for step in shared if starts[0][step] != starts[1][step]), None)
    return Comparison(steps, settings, first_weights, compare_steps(pairs, tolerance), tolerance)


def compare_steps(pairs: list[tuple[dict[str, Any], dict[str, Any]]], tolerance: float) -> dict[str, Part]:
    """Compare each part over pairs of lines, each pair of one step."""
    parts = {name: Part() for name in PARTS}
    for one, other in pairs:
        for name, part in parts.items():
            reason = _not_compared(name, one, other)
            if reason:
                part.not_compared[reason] += 1
            elif one[name] == other[name] and _expected_equal(name, one, other):
                part.equal += 1
            elif not _expected_equal(name, one, other) and _near(one[name], other[name], tolerance):
                part.near += 1
            elif part.differs is None:
                part.differs = one["step"], _where(name, one, other)
    return parts


def _not_compared(name: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Why a part of two lines cannot be compared; empty if it can."""
    if any(line[name] is None or (isinstance(line[name], list) and None in line[name]) for line in (one, other)):
        return "not recorded in both"
    settings: tuple[str, ...] = ()
    if name.endswith("_random") or (name == "batch" and None in (one["samples"], other["samples"])):
        settings = _SPLIT
    elif name == "weights":
        settings = (*_SPLIT, "strategy", "parts", "elements")
    return _differing(settings, one, other)


def _differing(settings: tuple[str, ...], one: dict[str, Any], other: dict[str, Any]) -> str:
    pairs = ((name, one["start"].get(name), other["start"].get(name)) for name in settings)
    return next((f"{name.replace('_', ' ')}: {a} and {b}" for name, a, b in pairs if a != b), "")


def _expected_equal(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs that should agree have this part equal to the bit, and not only up to rounding."""
    return name != "loss" or not _differing((*_SPLIT, "strategy"), one, other)


def _near(one: Any, other: Any, tolerance: float) -> bool:
    a, b = _mean(one), _mean(other)
    return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))


def _mean(values: Any) -> float:
    numbers = [float(value) for value in (values if isinstance(values, list) else [values])]
    return sum(numbers) / len(numbers)


def _where(name: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    """Values or ranks that differ, in brackets."""
    a, b = one[name], other[name]
    if name == "samples":
        return f" ({a} and {b})"
    world = one["start"]["processes"]
    lists = [value if isinstance(value, list) else [value] * world for value in (a, b)]
    ranks = [rank for rank, (x, y) in enumerate(zip(*lists, strict=False)) if x != y]
    if name == "batch" or world == 1 or len(lists[0]) != len(lists[1]):
        return f" ({_mean(a)!r} and {_mean(b)!r})" if name == "loss" else ""
    return f" (rank {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''})"


def _steps(number: int) -> str:
    return f"{number:,} step{'s' * (number != 1)}"
