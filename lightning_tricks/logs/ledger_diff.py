"""The first step and the first thing in which two ledgers differ, and whether a ledger is whole. Imports no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.ledger_file import PARTS, Ledger, Line

TOLERANCE = 0.01  # of losses over world sizes; that of the same data elsewhere in the run differs by more

NAMES = {
    "torch_random": "random state of torch",
    "other_random": "random state of NumPy and Python",
    "optimizer": "optimizer, buffers and scaler",
}
MEANINGS = {
    "samples": "the runs took other samples: another global batch size, skip_samples, data or resume point",
    "batch": "the batches have other values, or the same rows in another order",
    "torch_random": "another seed, or more or fewer random numbers drawn",
    "other_random": "another seed or none, or more or fewer random numbers drawn: see --seed_everything",
    "loss": "from equal data and random state: other weights before the step, other code, or a device that computes "
    "otherwise",
    "optimizer": "from an equal loss: another gradient, moment, count, setting, learning rate, buffer or loss scale",
    "weights": "from an equal loss: another gradient, optimizer or learning rate, or a weight that was changed",
}
_SPLIT = ("processes", "data_ranks", "micro_batches")


def name_of(part: str) -> str:
    """A part for people."""
    return NAMES.get(part, part)


@dataclass
class Part:
    """The result of comparing one part over all steps."""

    equal: int = 0  # number of steps at which it is equal to the bit
    near: int = 0  # number of steps at which it is equal within the tolerance
    not_compared: Counter[str] = field(default_factory=Counter)  # number of steps by reason
    differs: int | None = None  # the first step at which it differs
    detail: str = ""  # values or ranks that differ there

    @property
    def place(self) -> str:
        """Such as: at step 5 (rank 1)."""
        return f"at step {self.differs}" + (f" ({self.detail})" if self.detail else "")

    def line(self, tolerance: float) -> str:
        """The part's line, without its name."""
        words = [] if self.differs is None else [f"differs first {self.place}"]
        if self.equal:
            words.append(f"equal at {_steps(self.equal)}")
        if self.near:
            words.append(f"within {tolerance:g} at {_steps(self.near)}")
        words += [f"not compared at {_steps(number)} ({reason})" for reason, number in self.not_compared.items()]
        return "; ".join(words)


@dataclass
class LedgerDiff:
    """Two ledgers side by side."""

    steps: list[int]  # that both have
    settings: list[str]  # that differ at the first of these steps, as text
    first_weights: int | None  # first start that both have and that begins with different weights
    parts: dict[str, Part]
    tolerance: float  # relative, for losses that are not expected to be equal to the bit

    def first(self) -> tuple[int, list[str]] | None:
        """See `first_difference`."""
        return first_difference(self.parts)

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"compared: {len(self.steps)} steps, from {self.steps[0]} to {self.steps[-1]}"
        if self.settings:
            yield f"settings that differ: {'; '.join(self.settings)}"
        yield from self.part_lines()
        first = self.first()
        if self.first_weights is not None and (first is None or self.first_weights <= first[0]):
            yield f"ledger diff: the first difference is in the weights with which step {self.first_weights} begins"
        elif first is not None:
            step, (cause, *others) = first
            also = f"; {', '.join(map(name_of, others))} too" if others else ""
            yield f"ledger diff: the first difference is at step {step}, in {name_of(cause)}{also}"
            yield f"  {MEANINGS[cause]}"
        else:
            yield "ledger diff: no difference" + ("" if self.all_equal else " in what was compared")

    def record(self) -> dict[str, Any]:
        """The report for JSON."""
        of_first = {"differs": self.differs, "first_difference": self.first(), "compared_steps": len(self.steps)}
        return of_first | {name: value for name, value in asdict(self).items() if name != "steps"}

    def part_lines(self) -> Iterator[str]:
        """A line for each part."""
        for name, part in self.parts.items():
            yield f"{name_of(name)}: {part.line(self.tolerance)}"

    @property
    def all_equal(self) -> bool:
        """Whether each part was compared at each step, and is equal to the bit."""
        return all(part.equal == len(self.steps) for part in self.parts.values())

    @property
    def differs(self) -> bool:
        """Whether any part that was compared differs."""
        return self.first() is not None or self.first_weights is not None


def compare(one: Ledger, other: Ledger, tolerance: float = TOLERANCE) -> LedgerDiff:
    """Compare the steps that two ledgers share.

    `tolerance` is the relative difference of losses that rounding may explain, between runs that were split in
    different ways over processes, micro-batches or a strategy.

    Raises:
        UsageError: they share none.
    """
    steps = sorted(one.steps.keys() & other.steps.keys())
    if not steps:
        raise UsageError(f"{one.path} has {_range(one)} and {other.path} {_range(other)}: they have no step in common")
    first = [ledger.steps[steps[0]]["start"] for ledger in (one, other)]
    settings = [
        f"{name} {first[0].get(name)} and {first[1].get(name)}"
        for name in first[0]
        if name not in ("start", "weights") and first[0].get(name) != first[1].get(name)
    ]
    a, b = ({line["start"]: line["weights"] for line in ledger.starts} for ledger in (one, other))
    shared = sorted(step for step in a.keys() & b.keys() if None not in (a[step], b[step]))
    first_weights = next((step for step in shared if a[step] != b[step]), None)
    parts = compare_steps(((one.steps[step], other.steps[step]) for step in steps), tolerance)
    return LedgerDiff(steps, settings, first_weights, parts, tolerance)


def compare_steps(pairs: Iterable[tuple[Line, Line]], tolerance: float = TOLERANCE) -> dict[str, Part]:
    """Compare each part over pairs of lines, each pair of one step; without those that no line has."""
    parts = {name: Part() for name in PARTS}
    recorded = set()
    for one, other in pairs:
        for name, part in parts.items():
            if one[name] is not None or other[name] is not None:
                recorded.add(name)
            exact = name != "loss" or not _differing((*_SPLIT, "strategy"), one, other)
            if reason := _not_compared(name, one, other):
                part.not_compared[reason] += 1
            elif exact and one[name] == other[name]:
                part.equal += 1
            elif not exact and _near(one[name], other[name], tolerance):
                part.near += 1
            elif part.differs is None or one["step"] < part.differs:
                part.differs, part.detail = one["step"], _where(name, one, other)
    return {name: part for name, part in parts.items() if name in recorded or name != "optimizer"}


def first_difference(parts: dict[str, Part]) -> tuple[int, list[str]] | None:
    """The first step at which a part differs, and the parts that differ first there, in their order."""
    found = {name: part.differs for name, part in parts.items() if part.differs is not None}
    first = min(found.values(), default=None)
    return None if first is None else (first, [name for name, step in found.items() if step == first])


def _not_compared(name: str, one: Line, other: Line) -> str:
    """Why a part of two lines cannot be compared; empty if it can."""
    if any(line[name] is None or (isinstance(line[name], list) and None in line[name]) for line in (one, other)):
        return "not recorded in both"
    settings: tuple[str, ...] = ()
    if name.endswith("_random") or (name == "batch" and None in (one["samples"], other["samples"])):
        settings = _SPLIT
    elif name in ("weights", "optimizer"):
        settings = (*_SPLIT, "strategy", "parts", "elements")
    return _differing(settings, one, other)


def _differing(settings: tuple[str, ...], one: Line, other: Line) -> str:
    pairs = ((name, one["start"].get(name), other["start"].get(name)) for name in settings)
    return next((f"{name.replace('_', ' ')}: {a} and {b}" for name, a, b in pairs if a != b), "")


def _near(one: Any, other: Any, tolerance: float) -> bool:
    a, b = float(one), float(other)
    return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))


def _where(name: str, one: Line, other: Line) -> str:
    """Values or ranks that differ."""
    a, b = one[name], other[name]
    if name in ("samples", "loss"):
        return f"{a} and {b}"
    world = one["start"]["processes"]
    lists = [value if isinstance(value, list) else [value] * world for value in (a, b)]
    ranks = [rank for rank, (x, y) in enumerate(zip(*lists, strict=False)) if x != y]
    if name == "batch" or world == 1 or len(lists[0]) != len(lists[1]):
        return ""
    return f"rank {', '.join(map(str, ranks[:8]))}{', ...' if ranks[8:] else ''}"


def _steps(number: int) -> str:
    return f"{number:,} step{'s' * (number != 1)}"


def _range(one: Ledger) -> str:
    return f"steps {min(one.steps)} to {max(one.steps)}"


def summary(one: Ledger) -> str:
    """A ledger in one line: its file, its steps, its starts."""
    processes = one.starts[-1]["processes"]
    starts = ", ".join(str(line["start"]) for line in one.starts)
    return f"{one.path}: {_range(one)}, {processes} process{'es' * (processes > 1)}, started at step {starts}"


def check(one: Ledger) -> tuple[list[str], list[str]]:
    """What there is to say of a ledger, and what is wrong with it: a line each."""
    said, problems = [summary(one)], [*_problems(one)]
    if one.unfinished:
        said.append("the last line is unfinished: the run was killed while it was written, or is writing it now")
    if one.repeated:
        steps = [again["step"] for _, again in one.repeated]
        said.append(f"repeated after a restart: {len(steps):,} steps, from {min(steps)} to {max(steps)}")
        if (first := first_difference(compare_steps(one.repeated))) is not None:
            problems.append(f"a repeated step is not as it was: {name_of(first[1][0])} at step {first[0]}")
    if not problems:
        said.append(
            "ledger check: every line follows from the line before" + (", repeated steps agree" * bool(one.repeated))
        )
    return said, problems


def _problems(one: Ledger) -> Iterator[str]:
    for number in one.broken:
        yield f"line {number} does not follow from the line before: lines were changed or lost"
    for before, step in pairwise(sorted(one.steps)):
        if step != before + 1:
            yield f"steps {before + 1} to {step - 1} are missing: a power failure can take lines that a kill leaves"
    for step, line in sorted(one.steps.items()):  # the first at which ranks with copies of all weights hold other ones
        weights: Any = line["weights"]
        if isinstance(weights, list) and not line["start"].get("sharded") and None not in weights:
            most, _ = Counter(weights).most_common(1)[0]
            ranks = ", ".join(str(rank) for rank, value in enumerate(weights) if value != most)
            yield f"the ranks hold different weights from step {step} on: rank {ranks} differs from the others"
            return
