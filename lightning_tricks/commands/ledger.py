"""`ledger`: the first step and the first thing in which two runs differ; whether a ledger is whole. Loads no torch."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._quote import say
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.compare_records import Difference, Record, first_differences
from lightning_tricks.monitors.run_ledger.ledger_file import PARTS, Ledger, read_ledger

TOLERANCE = 0.01  # of losses over world sizes; that of the same data elsewhere in the run differs by more

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
    """The result of comparing one part over all steps."""

    equal: int = 0  # number of steps at which it is equal to the bit
    near: int = 0  # number of steps at which it is equal within the tolerance
    not_compared: Counter[str] = field(default_factory=Counter)  # number of steps by reason
    differs: Difference | None = None  # the first one

    def line(self, tolerance: float) -> str:
        """The part's line, without its name."""
        words = []
        if self.differs is not None:
            words.append(f"differs first {self.differs.place}")
        if self.equal:
            words.append(f"equal at {_steps(self.equal)}")
        if self.near:
            words.append(f"within {tolerance:g} at {_steps(self.near)}")
        words += [f"not compared at {_steps(number)} ({reason})" for reason, number in self.not_compared.items()]
        return "; ".join(words)


@dataclass
class Comparison:
    """Two ledgers side by side."""

    steps: list[int]  # that both have
    settings: list[str]  # that differ at the first of these steps, as text
    first_weights: int | None  # first start that both have and that begins with different weights
    parts: dict[str, Part]
    tolerance: float  # relative, for losses that are not expected to be equal to the bit

    def first(self) -> tuple[int, list[str]] | None:
        """The first step with a difference, and the parts that differ first there, in their order."""
        found = sorted(part.differs for part in self.parts.values() if part.differs is not None)
        if not found:
            return None
        return found[0].step, [difference.part for difference in found if difference.step == found[0].step]

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

    `tolerance` is the relative difference of losses that rounding may explain, between runs that were split in
    different ways over processes, micro-batches or a strategy.
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


def compare_steps(pairs: list[tuple[Record, Record]], tolerance: float) -> dict[str, Part]:
    """Compare each part over pairs of lines, each pair of one step."""
    parts = {name: Part() for name in PARTS}

    def judge(name: str, one: Record, other: Record) -> str | None:
        part, exact = parts[name], _expected_equal(name, one, other)
        if reason := _not_compared(name, one, other):
            part.not_compared[reason] += 1
        elif exact and one[name] == other[name]:
            part.equal += 1
        elif not exact and _near(one[name], other[name], tolerance):
            part.near += 1
        else:
            return _where(name, one, other)
        return None

    for difference in first_differences(pairs, PARTS, judge):
        parts[difference.part].differs = difference
    return parts


def _not_compared(name: str, one: Record, other: Record) -> str:
    """Why a part of two lines cannot be compared; empty if it can."""
    if any(line[name] is None or (isinstance(line[name], list) and None in line[name]) for line in (one, other)):
        return "not recorded in both"
    settings: tuple[str, ...] = ()
    if name.endswith("_random") or (name == "batch" and None in (one["samples"], other["samples"])):
        settings = _SPLIT
    elif name == "weights":
        settings = (*_SPLIT, "strategy", "parts", "elements")
    return _differing(settings, one, other)


def _differing(settings: tuple[str, ...], one: Record, other: Record) -> str:
    pairs = ((name, one["start"].get(name), other["start"].get(name)) for name in settings)
    return next((f"{name.replace('_', ' ')}: {a} and {b}" for name, a, b in pairs if a != b), "")


def _expected_equal(name: str, one: Record, other: Record) -> bool:
    """Whether two runs that should agree have this part equal to the bit, and not only up to rounding."""
    return name != "loss" or not _differing((*_SPLIT, "strategy"), one, other)


def _near(one: Any, other: Any, tolerance: float) -> bool:
    a, b = float(one), float(other)
    return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))


def _where(name: str, one: Record, other: Record) -> str:
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


def run(args: list[str]) -> None:
    """`ledger diff A B` and `ledger check A`; exits with 1 if something differs, or is not whole.

    Raises:
        UsageError: a file is missing or is no ledger; two ledgers have no step in common.
    """
    parser = CommandParser(
        "lightning-tricks ledger",
        description="Read what the callback RunLedger has written. Each place is a run's folder, or the file.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    diff = commands.add_parser("diff", help="the first step, and the first thing, in which two runs differ")
    diff.add_argument("one", metavar="A")
    diff.add_argument("other", metavar="B")
    diff.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="relative, for losses over world sizes; default %(default)s"
    )
    check = commands.add_parser("check", help="whether lines were changed or lost, and whether repeated steps agree")
    check.add_argument("one", metavar="A")
    options = parser.parse_args(args)
    if options.command == "diff" and not 0 <= options.tolerance < math.inf:
        raise UsageError(f"ledger: tolerance={options.tolerance}: give a relative difference, 0 or more")
    if options.command == "check":
        problems = print_check(read_ledger(options.one), TOLERANCE)
        sys.exit(1 if problems else 0)
    sys.exit(1 if _print_diff(read_ledger(options.one), read_ledger(options.other), options.tolerance) else 0)


def _print_diff(one: Ledger, other: Ledger, tolerance: float) -> bool:
    if not one.steps.keys() & other.steps.keys():
        raise UsageError(f"{one.path} has {_range(one)} and {other.path} {_range(other)}: they have no step in common")
    for name, each in (("A", one), ("B", other)):
        say(f"{name}: {summary(each)}")
        if each.broken:
            print(f"{name}: line {each.broken[0]} does not follow from the line before it: see `ledger check`")
    comparison = compare(one, other, tolerance)
    for line in comparison.lines():
        say(line)
    return comparison.differs


def _range(one: Ledger) -> str:
    return f"steps {min(one.steps)} to {max(one.steps)}"


def summary(one: Ledger) -> str:
    """A ledger in one line: its file, its steps, its starts."""
    processes = one.starts[-1]["processes"]
    starts = ", ".join(str(line["start"]) for line in one.starts)
    return f"{one.path}: {_range(one)}, {processes} process{'es' * (processes > 1)}, started at step {starts}"


def print_check(one: Ledger, tolerance: float) -> list[str]:
    """Print what is wrong with a ledger, or that nothing is; returns the lines on what is wrong."""
    say(summary(one))
    if one.unfinished:
        print("the last line is unfinished: the run was killed while it was written, or is writing it now")
    problems = [*_broken(one), *_missing(one), *_unequal_copies(one)]
    if one.repeated:
        steps = [again["step"] for _, again in one.repeated]
        parts = compare_steps(one.repeated, tolerance)
        different = sorted(part.differs for part in parts.values() if part.differs)
        print(f"repeated after a restart: {len(steps):,} steps, from {min(steps)} to {max(steps)}")
        if different:
            name = NAMES.get(different[0].part, different[0].part)
            problems.append(f"a repeated step is not as it was: {name} at step {different[0].step}")
    for problem in problems:
        say(problem)
    if not problems:
        print("ledger check: every line follows from the line before" + (", repeated steps agree" * bool(one.repeated)))
    return problems


def _broken(one: Ledger) -> Iterator[str]:
    for number in one.broken:
        yield f"line {number} does not follow from the line before: lines were changed or lost"


def _missing(one: Ledger) -> Iterator[str]:
    before = min(one.steps) - 1
    for step in sorted(one.steps):
        if step != before + 1:
            yield f"steps {before + 1} to {step - 1} are missing: a power failure can take lines that a kill leaves"
        before = step


def _unequal_copies(one: Ledger) -> Iterator[str]:
    """The first step at which ranks that hold copies of all weights hold different ones."""
    for step, line in sorted(one.steps.items()):
        weights: Any = line["weights"]
        if isinstance(weights, list) and not line["start"].get("sharded") and None not in weights:
            most, _ = Counter(weights).most_common(1)[0]
            ranks = ", ".join(str(rank) for rank, value in enumerate(weights) if value != most)
            yield f"the ranks hold different weights from step {step} on: rank {ranks} differs from the others"
            return
