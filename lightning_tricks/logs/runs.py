"""Many runs as one table: which settings differ, in which order the rows stand, and what is printed of a value."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks.logs.run import Run
from lightning_tricks.logs.table import lines_of, setting_text, shortened

COLUMNS = tuple(each.name for each in fields(Run) if each.name not in ("settings", "unread", "folder", "scalars"))
_LONGEST = 24  # characters of a setting in the printed table
_HEADS = {  # in the printed table; JSON and CSV have the columns' own names
    "best_val_loss": "best",
    "best_step": "at step",
    "bits_per_byte": "bits/byte",
    "best_bits_per_byte": "best",
}


class Table:
    """Runs in an order, with the settings in which they differ as columns of their own."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: _natural(run.name))
        self.settings = differing(self.runs)

    def sorted_by(self, column: str, descending: bool = False) -> "Table":
        """The same with the rows sorted by a column; rows without a value come last, equal ones by name.

        Raises:
            UsageError: there is no such column.
        """
        if column not in (names := [*COLUMNS, *self.settings]):
            columns = ", ".join(names)
            raise UsageError(f"runs: sort={column}{did_you_mean(column, names)}: give one of {columns}")
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

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each run, for CSV."""
        return [{name: self._value(run, name) for name in [*COLUMNS, *self.settings]} for run in self.runs]

    def csv(self) -> str:
        """The rows as CSV."""
        text, rows = io.StringIO(), self.rows()
        writer = csv.writer(text, lineterminator="\n")
        for row in (rows[0], *map(dict.values, rows)):  # names of others stay on their line
            writer.writerow([printable(value) if isinstance(value, str) else value for value in row])
        return text.getvalue()

    def text(self) -> str:
        """The table to print; columns in which no run has a value are left out."""
        names = [name for name in [*COLUMNS, *self.settings] if any(self._shown(run, name) for run in self.runs)]
        heads = [_HEADS.get(name, name.replace("_", " ") if name in COLUMNS else name) for name in names]
        return "\n".join(lines_of([heads, *([self._shown(run, name) for name in names] for run in self.runs)], {0, 1}))

    def _shown(self, run: Run, name: str) -> str:
        value = self._value(run, name)
        if value is None:
            return ""
        if name in ("goodput", "mfu"):
            return f"{value:.1%}"
        if name in ("steps", "best_step", "tokens"):
            return f"{value:,}"
        if name == "hours":
            return f"{value:.2f}"
        if name in COLUMNS:
            return value if isinstance(value, str) else f"{value:.4f}"
        return shortened(setting_text(value), _LONGEST)


def differing(runs: Sequence[Run]) -> dict[str, str]:
    """The settings in which runs differ: the shortest name that tells them apart, and the whole dotted name.

    A run without any settings on file does not count; a setting that a run lacks counts as one of its own.
    """
    known = [run for run in runs if run.settings]
    names = sorted({name for run in known for name in run.settings})
    different = [name for name in names if len({repr(run.settings.get(name)) for run in known}) > 1]
    owners = Counter(end for name in different for end in _ends(name))
    return {
        next((end for end in _ends(name) if end not in COLUMNS and owners[end] == 1), name): name for name in different
    }


def _ends(name: str) -> list[str]:
    """The ends of a dotted name, the shortest first.

    Example:
        >>> _ends("data.seed")
        ['seed', 'data.seed']
    """
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


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
