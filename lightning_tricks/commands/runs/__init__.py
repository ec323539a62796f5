"""`runs`: all runs below a folder in one table: how far each came, how good it is, what it cost. Loads no torch.

From the first to the last: `event_file`, `read_run` and `table`.
"""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._quote import printable, say
from lightning_tricks._writable import check_file
from lightning_tricks.commands import CommandParser


def run(args: list[str]) -> None:
    """Print a table of the runs in a folder, or write it as JSON or CSV; a line for each file that cannot be read.

    Raises:
        UsageError: there is no such folder, or none of a run in it; an unknown column; a file cannot be written.
    """
    from lightning_tricks.commands.runs.table import Table, find_runs

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
    runs = find_runs(Path(options.folder), options.val_loss)
    table = Table(runs).sorted_by(options.sort, options.descending)
    _write(options.json, json.dumps(table.records(), indent=1, allow_nan=False) + "\n")
    _write(options.csv, _csv(table.rows()))
    if "-" not in (options.json, options.csv):
        print(table.text())
    for run in table.runs:
        for line in run.unread:
            say(f"not read: {run.name}: {line}", file=sys.stderr)


def _write(file: str | None, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
    elif file is not None:
        Path(file).write_text(text, encoding="utf-8")


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writerow({name: printable(name) for name in rows[0]})
    for row in rows:  # names of others stay on their line
        writer.writerow({name: printable(value) if isinstance(value, str) else value for name, value in row.items()})
    return text.getvalue()
