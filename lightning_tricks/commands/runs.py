"""`runs`: all runs below a folder in one table: how far each came, how good it is, what it cost. Loads no torch."""

import sys
from pathlib import Path

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import check_files, json_text, write_answers


def run(args: list[str]) -> None:
    """Print a table of the runs in a folder, or write it as JSON or CSV; a line for each file that cannot be read.

    Raises:
        UsageError: there is no such folder, or none of a run in it; an unknown column; a file cannot be written.
    """
    from lightning_tricks.logs.run import find_runs
    from lightning_tricks.logs.runs import Table

    parser = CommandParser(
        "lightning-tricks runs",
        description="A table of the runs below a folder, of this collection or of another Lightning project.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--sort", default="best_val_loss", metavar="COLUMN", help="default: %(default)s")
    parser.add_argument("--descending", action="store_true", help="the largest value first")
    parser.add_argument(
        "--val_loss", metavar="NAME", help="name of the validation loss; default: val/loss, or val_loss"
    )
    parser.add_argument("--json", metavar="FILE", help="write JSON, - for standard output")
    parser.add_argument("--csv", metavar="FILE", help="write CSV, - for standard output")
    options = parser.parse_args(args)
    if options.json == options.csv == "-":
        raise UsageError("runs: json=-, csv=-: standard output takes one of them: name a file for the other")
    check_files("runs", options)
    table = Table(find_runs(Path(options.folder), options.val_loss)).sorted_by(options.sort, options.descending)
    write_answers(options, table.text, json=lambda: json_text(table.records()), csv=table.csv)
    for one in table.runs:
        for line in one.unread:
            say(f"not read: {one.name}: {line}", file=sys.stderr)
