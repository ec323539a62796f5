"""`ledger`: the first step and the first thing in which two runs differ; whether a ledger is whole. Loads no torch."""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.commands.command_parser import CommandParser
from lightning_tricks.commands.compare_ledgers import NAMES, compare, compare_steps
from lightning_tricks.monitors.run_ledger.ledger_file import Ledger, read_ledger

TOLERANCE = 0.01  # of losses over world sizes; that of the same data elsewhere in the run differs by more


def ledger(args: list[str]) -> None:
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
    if options.command == "check":
        problems = print_check(read_ledger(options.one), TOLERANCE)
        sys.exit(1 if problems else 0)
    sys.exit(1 if _print_diff(read_ledger(options.one), read_ledger(options.other), options.tolerance) else 0)


def _print_diff(one: Ledger, other: Ledger, tolerance: float) -> bool:
    if not one.steps.keys() & other.steps.keys():
        raise UsageError(f"{one.path} has {_range(one)} and {other.path} {_range(other)}: they have no step in common")
    for name, each in (("A", one), ("B", other)):
        print(f"{name}: {summary(each)}")
        if each.broken:
            print(f"{name}: line {each.broken[0]} does not follow from the line before it: see `ledger check`")
    comparison = compare(one, other, tolerance)
    for line in comparison.lines():
        print(line)
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
    print(summary(one))
    if one.unfinished:
        print("the last line is unfinished: the run was killed while it was written, or is writing it now")
    problems = [*_broken(one), *_missing(one), *_unequal_copies(one)]
    if one.repeated:
        steps = [again["step"] for _, again in one.repeated]
        parts = compare_steps(one.repeated, tolerance)
        different = [(part.differs[0], NAMES.get(name, name)) for name, part in parts.items() if part.differs]
        print(f"repeated after a restart: {len(steps):,} steps, from {min(steps)} to {max(steps)}")
        if different:
            step, name = min(different, key=lambda each: each[0])
            problems.append(f"a repeated step is not as it was: {name} at step {step}")
    for problem in problems:
        print(problem)
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
