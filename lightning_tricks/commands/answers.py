"""The forms in which commands answer, and the option of those on logs for the names of another project's metrics."""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.writable import check_file
from lightning_tricks.logs.scalars import check_roles


def add_answers(parser: ArgumentParser) -> None:
    """Add the options of `doctor` and `compare`."""
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and plots")
    add_names(parser)


def add_names(parser: ArgumentParser) -> None:
    """Add the options of all commands on logs."""
    parser.add_argument(
        "--names", nargs="+", default=[], metavar="ROLE=NAME", help="of metrics, such as loss=my/loss val_loss=my/val"
    )
    add_json(parser)


def names_of(command: str, options: Namespace) -> dict[str, str]:
    """The names of metrics by their roles.

    Raises:
        UsageError: one is no `ROLE=NAME`, or there is no such role.
    """
    names = dict(word.partition("=")[::2] for word in options.names)
    if wrong := next((role for role, name in names.items() if not name), None):
        raise UsageError(f"{command}: names={wrong}: give ROLE=NAME, such as val_loss=my/val")
    check_roles(names)
    return names


def check_files(command: str, options: Namespace) -> None:
    """Refuse files that cannot be written, before the command has worked for them; a page has no standard output."""
    for name in ("html", "json"):
        file = getattr(options, name, None)
        if file is not None and (file != "-" or name == "html"):
            check_file(f"{command}: {name}", file)


def write_answers(options: Namespace, text: Callable[[], str], **forms: Callable[[], str]) -> None:
    """Write each form where it is asked for; print the text unless a form goes to standard output."""
    files = {name: getattr(options, name) for name in forms}
    for name, file in files.items():
        if file == "-":
            sys.stdout.write(forms[name]())
        elif file is not None:
            Path(file).write_text(forms[name](), encoding="utf-8")
    if "-" not in files.values():
        print(text())


def json_text(value: Any) -> str:
    """JSON for people too; a number that JSON lacks, such as NaN, is null."""
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def check_json(command: str, file: str | None) -> AbstractContextManager[Any]:
    """Refuse the file of an option `json` that cannot be written, before the command has worked for it.

    With `-`, what is printed inside the `with` that it gives goes to the error output: standard output has JSON alone.
    """
    if file not in (None, "-"):
        check_file(f"{command}: json", file)
    return redirect_stdout(sys.stderr) if file == "-" else nullcontext()


def add_json(parser: ArgumentParser) -> None:
    """Add the option `json`."""
    parser.add_argument("--json", metavar="FILE", help="write JSON, - for standard output")


def write_json(file: str | None, value: Any) -> None:
    """Write JSON to the file of an option `json`, if it names one; `-` is standard output, which has nothing else."""
    if file == "-":
        sys.stdout.write(json_text(value))
    elif file is not None:
        Path(file).write_text(json_text(value), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return {str(key): _plain(part) for key, part in value.items()} if isinstance(value, dict) else value
