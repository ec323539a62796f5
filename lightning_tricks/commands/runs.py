"""`runs`: all runs below a folder in one table: how far each came, how good it is, what it cost. Loads no torch."""

import json
import sys
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks._quote import say
from lightning_tricks._writable import check_file
from lightning_tricks.commands import CommandParser


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
    for name in ("json", "csv"):
        if getattr(options, name) not in (None, "-"):
            check_file(f"runs: {name}", getattr(options, name))
    table = Table(find_runs(Path(options.folder), options.val_loss)).sorted_by(options.sort, options.descending)
    written = {
        options.json: json.dumps(table.records(), indent=1, allow_nan=False) + "\n",
        options.csv: table.csv(),
    }
    for file, content in written.items():
        if file == "-":
            sys.stdout.write(content)
        elif file is not None:
            Path(file).write_text(content, encoding="utf-8")
    if "-" not in written:
        print(table.text())
    for one in table.runs:
        for line in one.unread:
            say(f"not read: {one.name}: {line}", file=sys.stderr)
