"""`runs`: all runs below a folder in one table: how far each came, how good it is, what it cost. Loads no torch."""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, say
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._core.terminal import terminal_columns, width, wrapped
from lightning_tricks.commands import CommandParser
from lightning_tricks.commands.answers import add_names, check_files, json_text, names_of, write_answers
from lightning_tricks.logs.run import COLUMNS, Run, differing, find_runs
from lightning_tricks.logs.table import lines_of, setting_text, shortened

_LONGEST = 24  # characters of a setting in the printed table
_HEADS = {  # in the printed table; JSON has the columns' own names
    "best_val_loss": "best loss",
    "best_step": "at step",
    "bits_per_byte": "bits/byte",
    "best_bits_per_byte": "best bits",
}


class Table:
    """Runs in an order, with the settings in which they differ as columns of their own."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: _natural(run.name))
        self.settings = differing(self.runs)
        self._sort = "best_val_loss"

    def sorted_by(self, column: str, descending: bool = False) -> "Table":
        """The same with the rows sorted by a column; rows without a value come last, equal ones by name.

        Raises:
            UsageError: there is no such column.
        """
        if column not in (names := [*COLUMNS, *self.settings]):
            columns = ", ".join(names)
            raise UsageError(f"runs: sort={column}{did_you_mean(column, names)}: give one of {columns}")
        self._sort = column
        known = [run for run in self.runs if _is_known(self._value(run, column))]
        rest = [run for run in self.runs if not _is_known(self._value(run, column))]
        known.sort(key=lambda run: _order(self._value(run, column)), reverse=descending)
        self.runs = [*known, *rest]
        return self

    def _value(self, run: Run, column: str) -> Any:
        return getattr(run, column) if column in COLUMNS else run.settings.get(self.settings[column])

    def records(self) -> list[dict[str, Any]]:
        """A mapping for each run, for JSON."""
        return [
            {
                **{name: getattr(run, name) for name in COLUMNS},
                "settings": {full: run.settings.get(full) for full in self.settings.values()},
            }
            for run in self.runs
        ]

    def text(self, columns: int = sys.maxsize) -> str:
        """The table to print, in so many columns of characters; what does not fit is named below it.

        Columns in which no run has a value are left out.
        """
        cells: dict[str, list[str]] = {}
        for name in dict.fromkeys(["name", *self.settings, "best_val_loss", "best_step", *COLUMNS]):
            column = [printable(self._shown(run, name)) for run in self.runs]
            if name == "name":  # two runs differ in its end
                column = [text if len(text) <= columns // 2 else f"...{text[3 - columns // 2 :]}" for text in column]
            if any(column):
                head = _HEADS.get(name, name.replace("_", " ") if name in COLUMNS else name)
                cells[name] = [printable(head), *column]
        room, kept = columns + 2, set()
        same = {name for name, (_, *rows) in cells.items() if len(set(rows)) == 1} | {"best_step"}  # tell the least
        for name in sorted(cells, key=lambda name: (name not in ("name", self._sort), name in same, name != "state")):
            if name in self.settings and room >= max(width(cells[name][0]), 8) + 2:
                cells[name] = [shortened(text, room - 2) for text in cells[name]]
            if (columns_of_it := max(map(width, cells[name])) + 2) <= room:
                kept.add(name)
                room -= columns_of_it
        names = [name for name in cells if name in kept]
        left = [at for at, name in enumerate(names) if name in ("name", "state")]

        def style(row: int, column: int) -> str | None:
            name = names[column]
            if row and name == "state" and self.runs[row - 1].state in ("failed", "diverged"):
                return "red"
            if not row or name not in ("best_val_loss", "best_bits_per_byte"):
                return "bold" if not row else "cyan" if name in self.settings else None
            values = [value for run in self.runs if _is_known(value := self._value(run, name))]
            return "green" if self._value(self.runs[row - 1], name) == min(values, default=None) else None

        lines = lines_of([*zip(*(cells[name] for name in names), strict=True)], left, style)
        if dropped := [cells[name][0] for name in cells if name not in kept]:
            lines += ["", wrapped(f"no room for: {', '.join(dropped)} (--json has all)", columns, 2)]
        return "\n".join(lines)

    def _shown(self, run: Run, name: str) -> str:
        value = self._value(run, name)
        if value is None:
            return ""
        if name == "sources":
            return shortened("  ".join(f"{source} {loss:.4f}" for source, loss in value.items()), 3 * _LONGEST)
        if name in ("goodput", "mfu"):
            return f"{value:.1%}"
        if name in ("steps", "best_step", "tokens"):
            return f"{value:,}"
        if name == "hours":
            return f"{value:.2f}"
        if name in COLUMNS:
            return value if isinstance(value, str) else f"{value:.4f}"
        return shortened(setting_text(value), _LONGEST)


def _natural(name: str) -> list[Any]:
    """A key by which `version_2` comes before `version_10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _order(value: Any) -> tuple[int, float, list[Any]]:
    """Numbers before words."""
    if isinstance(value, int | float):
        return 0, float(value), []
    return 1, 0.0, _natural(str(value))


def run(args: list[str]) -> None:
    """Print a table of the runs in a folder, or write it as JSON; a line for each file that cannot be read.

    Raises:
        UsageError: there is no such folder, or none of a run in it; an unknown column; a file cannot be written.
    """
    parser = CommandParser(
        "runs", description="A table of the runs below a folder, of this collection or of another Lightning project."
    )
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--sort", default="best_val_loss", metavar="COLUMN", help="default: %(default)s")
    parser.add_argument("--descending", action="store_true", help="the largest value first")
    parser.add_argument("--forecast", metavar="FILE", help="of a ladder: how far runs of its recipe came out from it")
    add_names(parser)
    options = parser.parse_args(args)
    names = names_of("runs", options)
    check_files("runs", options)
    table = Table(find_runs(Path(options.folder), names)).sorted_by(options.sort, options.descending)
    records, lines = table.records(), []
    if options.forecast is not None:
        from lightning_tricks.logs import forecast_file as on_file  # here, as it loads numpy

        forecast = on_file.read_forecast("runs: forecast", options.forecast)
        found = [on_file.outcome(forecast, run) for run in table.runs]
        records = [one | {"forecast": beside} for one, beside in zip(records, found, strict=True)]
        lines = ["", *(printable(each["line"]) for each in found if each["loss"] is not None)]
    write_answers(
        options,
        lambda: "\n".join([table.text(terminal_columns(sys.maxsize)), *lines]),
        json=lambda: json_text(records),
    )
    for one in table.runs:
        for line in one.unread:
            say(f"not read: {one.name}: {line}", file=sys.stderr)
