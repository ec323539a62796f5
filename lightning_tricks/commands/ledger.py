"""`ledger`: the first step and the first thing in which two runs differ; whether a ledger is whole. Loads no torch."""

import math
import sys

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_json, check_json, write_json


def run(args: list[str]) -> None:
    """`ledger diff A B` and `ledger check A`; exits with 1 if something differs, or is not whole.

    Raises:
        UsageError: a file is missing or is no ledger; two ledgers have no step in common.
    """
    from lightning_tricks.logs.ledger_diff import TOLERANCE, check, compare, summary
    from lightning_tricks.logs.ledger_file import read_ledger

    parser = CommandParser(
        "ledger", description="Read what the callback RunLedger has written. Each place is a run's folder, or the file."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    diff = commands.add_parser("diff", help="the first step, and the first thing, in which two runs differ")
    diff.add_argument("one", metavar="A")
    diff.add_argument("other", metavar="B")
    diff.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="relative, for losses over world sizes; default %(default)s"
    )
    checked = commands.add_parser("check", help="whether lines were changed or lost, and whether repeated steps agree")
    checked.add_argument("one", metavar="A")
    add_json(diff)
    add_json(checked)
    options = parser.parse_args(args)
    json_alone = check_json("ledger", options.json)
    if options.command == "check":
        said, problems = check(read_ledger(options.one))
        with json_alone:
            say(*said, *problems)
        write_json(options.json, {"whole": not problems, "problems": problems, "notes": said})
        sys.exit(bool(problems))
    if not 0 <= options.tolerance < math.inf:
        raise UsageError(f"ledger: tolerance={options.tolerance}: give a relative difference, 0 or more")
    ledgers = {"A": read_ledger(options.one), "B": read_ledger(options.other)}
    found = compare(ledgers["A"], ledgers["B"], options.tolerance)
    with json_alone:
        for name, ledger in ledgers.items():
            say(f"{name}: {summary(ledger)}")
            if ledger.broken:
                say(f"{name}: line {ledger.broken[0]} does not follow from the line before it: see `ledger check`")
        say(*found.lines())
    write_json(options.json, found.record())
    sys.exit(found.differs)
