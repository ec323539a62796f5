"""Options that the commands on logs share: the names of another project's metrics, and the forms of the answer."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._writable import check_file


def add_answers(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--names", nargs="+", default=[], metavar="ROLE=NAME", help="of metrics, such as loss=my/loss val_loss=my/val"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and plots")
    parser.add_argument("--json", metavar="FILE", help="write JSON, - for standard output")


def names_of(command: str, options: Namespace) -> dict[str, str]:
    """The names of metrics by their roles.

    Raises:
        UsageError: one is no `ROLE=NAME`; a file cannot be written.
    """
    names = dict(word.partition("=")[::2] for word in options.names)
    if wrong := next((role for role, name in names.items() if not name), None):
        raise UsageError(f"{command}: names={wrong}: give ROLE=NAME, such as val_loss=my/val")
    for name in ("html", "json"):
        if getattr(options, name) not in (None, "-" if name == "json" else None):
            check_file(f"{command}: {name}", getattr(options, name))
    return names


def write_answers(options: Namespace, text: Callable[[], str], page: Callable[[], str], record: dict[str, Any]) -> None:
    """Write the page and the JSON where they are asked for; print the text unless JSON is printed."""
    if options.html is not None:
        Path(options.html).write_text(page(), encoding="utf-8")
    written = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(written)
        return
    print(text())
    if options.json is not None:
        Path(options.json).write_text(written, encoding="utf-8")
