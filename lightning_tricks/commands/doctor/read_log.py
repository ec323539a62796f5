"""All metrics of one run from its folder: event files, `metrics.csv`, ledger, recipe. Imports no torch."""

import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._errors import UsageError
from lightning_tricks._foreign_files import LARGEST_STEP, number_of, open_csv, why
from lightning_tricks._suggest import did_you_mean
from lightning_tricks.commands.doctor.scalar_records import read_scalars
from lightning_tricks.commands.runs.event_file import open_records, time_of, values_of
from lightning_tricks.commands.runs.read_run import event_files, flat, is_run, settings_of
from lightning_tricks.monitors.doctor.other_symptoms import TELLING
from lightning_tricks.monitors.doctor.run_log import Floats, RunLog, Series, check_roles
from lightning_tricks.monitors.run_ledger.ledger_file import NAME as LEDGER
from lightning_tricks.monitors.run_ledger.ledger_file import read_ledger

_NOT_METRICS = ("hp/", "hp_metric", "epoch", "_hparams_/")  # how their names begin
_NO_COLUMN = ("step", "epoch", "")
_SPEED = "steps per second, by the times of the log"
_LONGEST = 300  # characters of a printed line
_WORDS = {"loss": "training loss", "val_loss": "validation loss"}


def find_run(folder: Path) -> Path:
    """The folder itself if it is that of a run, else the newest run below it.

    Raises:
        UsageError: no such folder, or no run in it.
    """
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "no such folder"
        raise UsageError(f"doctor: {folder}: {what}: give the folder in which a logger writes")
    runs = [folder] if _logs(folder) else [path for path in folder.rglob("*") if path.is_dir() and _logs(path)]
    runs = [path for path in runs if path == folder or is_run(path)]
    found = set(runs)
    runs = [path for path in runs if found.isdisjoint(path.parents)]  # the plan of a run lies in a folder of its own
    if not runs:
        raise UsageError(
            f"doctor: {folder}: there is no log in it (no metrics.csv, no event file): give the folder in which a "
            "logger writes"
        )
    return max(runs, key=lambda path: max(file.stat().st_mtime for file in _logs(path)))


def _logs(folder: Path) -> list[Path]:
    """The files of a log, none where the folder cannot be entered: another run may be the one that is meant."""
    try:
        return [file for file in (*event_files(folder), folder / "metrics.csv") if file.is_file()]
    except OSError:
        return []


def read_log(
    folder: Path,
    names: Mapping[str, str] | None = None,
    needed: Sequence[str] = ("loss",),
    command: str = "doctor",
) -> tuple[RunLog, list[str]]:
    """What a run has logged, and a line for each file that could not be read.

    Args:
        folder: of the run.
        names: of metrics, by their roles in `ROLES`, where they are other ones.
        needed: roles of which one must have been logged.
        command: that asks, for its error lines.

    Raises:
        UsageError: an unknown role or name; nothing can be read; none of `needed` was logged.
    """
    names = dict(names or {})
    check_roles(names)
    files: list[_File] = []
    unread: list[str] = []
    for file in [*sorted(event_files(folder)), folder / "metrics.csv"]:
        try:
            if file.name == "metrics.csv":
                files.append(_table(file, {name for of_events in files for name in of_events.columns}))
            else:
                files.append(_events(file))
            unread += [f"{file.name}: {files[-1].problem}"] * (files[-1].problem is not None)
        except (OSError, ValueError) as error:
            unread.append(f"{file.name}: {why(error)}")
    points = _Points(files)
    metrics = dict(points.series)
    if not metrics:
        reasons = f" ({'; '.join(unread)})" if unread else ""
        raise UsageError(f"{command}: {folder}: its log holds no scalars{reasons}: give the log of a training run")
    for role, name in names.items():
        if name not in metrics:
            raise UsageError(
                f"{command}: names={role}={name}{did_you_mean(name, metrics)}: it was not logged in {folder}; there "
                f"are {_some(metrics)}"
            )
    document, unread_settings = settings_of(folder)
    unread += unread_settings
    log = RunLog(metrics, dict(names), settings=flat(document))
    if (found := next((role for role in needed if role in log.names), None)) is None:
        words = " or ".join(_WORDS[role] for role in needed)
        raise UsageError(
            f"{command}: {folder}: no {words} among {_some(metrics)}: name it, such as "
            f"--names {shlex.quote(f'{needed[0]}={next(iter(metrics))}')}"
        )
    log.restarts = points.restarts(log.names[found])
    log.times = points.times(log.names[found])
    if "speed" not in log.names and len(speed := points.speed(log.names[found])):
        log.metrics, log.names["speed"] = {**metrics, _SPEED: speed}, _SPEED
    if (folder / LEDGER).is_file():
        _add_ledger(log, folder, unread)
    return log, unread


def read_printed(files: Sequence[str]) -> list[str]:
    """The lines of files that tell how a run ended, such as those of an error; at most 300 characters of each.

    Raises:
        UsageError: a file cannot be read.
    """
    found = []
    for file in files:
        try:
            with Path(file).open(encoding="utf-8", errors="replace") as lines:
                found += [line.strip()[:_LONGEST] for line in lines if TELLING.search(line)]
        except OSError as error:
            raise UsageError(f"doctor: stderr={file}: {error.strerror}: give what the run has printed") from None
    return found


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _add_ledger(log: RunLog, folder: Path, unread: list[str]) -> None:
    try:
        ledger = read_ledger(folder)
    except UsageError as error:
        unread.append(str(error))
        return
    log.restarts = sorted({*log.restarts, *(start["start"] for start in ledger.starts if start.get("start"))})
    log.batches = {step: line["batch"] for step, line in ledger.steps.items() if line.get("batch") is not None}


@dataclass
class _Column:
    """The points of one metric in one file, in the order in which they were written."""

    orders: NDArray[np.int64]  # number of the record or row
    steps: NDArray[np.int64]
    values: Floats
    times: Floats  # seconds since 1970, NaN where the file has none


@dataclass
class _File:
    """One file of a log."""

    columns: dict[str, _Column]
    resumed: list[tuple[int, int]] = field(default_factory=list)  # (order, step): later steps before it do not count
    problem: str | None = None  # a line on what was not read of it

    def __post_init__(self) -> None:
        orders, steps = np.array(self.resumed, dtype=np.int64).reshape(-1, 2).T
        self._orders = orders
        # of the points before each mark, those from this step on do not count; behind the last mark all do
        self._ends = np.append(np.minimum.accumulate(steps[::-1])[::-1], LARGEST_STEP + 1)
        self.first_mark = int(self._ends[0])

    def counting(self, column: _Column) -> NDArray[np.bool_]:
        """Which points of a column no mark behind them cuts off."""
        return column.steps < self._ends[np.searchsorted(self._orders, column.orders)]


class _Points:
    """The points of all files in the order in which they were written; a repeated step has its last value."""

    def __init__(self, files: Sequence[_File]) -> None:
        self.files = files
        self.series: dict[str, Series] = {}
        self._times: dict[str, Floats] = {}
        for name in dict.fromkeys(name for file in files for name in file.columns):
            self._join(name)

    def _join(self, name: str) -> None:
        steps, values, times = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        for file in self.files:
            # the marks of a file cut off points of earlier files too, and those of any metric
            column = file.columns.get(name)
            kept = steps < min(file.first_mark, int(column.steps[0]) if column is not None else LARGEST_STEP + 1)
            steps, values, times = steps[kept], values[kept], times[kept]
            if column is None:
                continue
            own = file.counting(column)
            steps = np.concatenate([steps, column.steps[own]])
            values = np.concatenate([values, column.values[own]])
            times = np.concatenate([times, column.times[own]])
        by_step = np.argsort(steps, kind="stable")
        last = by_step[np.append(np.diff(steps[by_step]) > 0, True)] if len(steps) else by_step
        self.series[name], self._times[name] = Series(steps[last], values[last]), times[last]

    def restarts(self, loss: str) -> list[int]:
        """First steps of resumed processes: by their marks, where a later file goes on, or where steps go back."""
        columns = [file.columns[loss] for file in self.files if loss in file.columns]
        found = {step for file in self.files for _, step in file.resumed}
        found |= {int(column.steps[0]) for column in columns[1:] if column.steps[0] > columns[0].steps[0]}
        for column in columns:
            found |= set(column.steps[1:][np.diff(column.steps) < 0].tolist())
        return sorted(step for step in found if step > 0)

    def times(self, name: str) -> Series:
        """Seconds since 1970 at the points of a metric; empty where its files have none."""
        return Series(self.series[name].steps, self._times[name]).finite()

    def speed(self, name: str) -> Series:
        """Steps per second between the points of a metric, by its times; empty where it has none."""
        steps, times = self.series[name].steps, self._times[name]
        passed = np.diff(times)
        known = passed > 0
        return Series(steps[1:][known], np.diff(steps)[known] / passed[known])


def _events(file: Path) -> _File:
    """The points of an event file, up to where it is cut off.

    Raises:
        ValueError: it holds no record.
    """
    columns: dict[str, _Column] = {}
    lists: dict[str, list[tuple[int, int, float, float]]] = {}
    resumed, no_events = [], 0
    with open_records(file) as records:
        if records is None:
            return _File({})
        scalars, problem = read_scalars(records), records.damage
        for number in scalars.others:
            event = records.parse(number)
            if event is None:
                no_events += 1
                continue
            if event.HasField("session_log") and 0 < event.step <= LARGEST_STEP:
                resumed.append((number, int(event.step)))
            for name, value in values_of(event).items():
                lists.setdefault(name, []).append((number, int(event.step), value, time_of(event) or math.nan))
    if no_events:
        problem = f"{no_events:,} record{'s' * (no_events > 1)} left out that hold no event" + f"; {problem}" * bool(
            problem
        )
    for name, column in scalars.columns.items():
        lists_of_name = np.array(lists.pop(name, []), dtype=np.float64).reshape(-1, 4).T
        joined = [np.concatenate(pair) for pair in zip(column, lists_of_name, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        columns[name] = _column([each[order] for each in joined])
    for name, points in lists.items():
        columns[name] = _column(np.array(points, dtype=np.float64).T)
    columns = {name: column for name, column in columns.items() if not name.startswith(_NOT_METRICS)}
    return _File(columns, resumed, problem)


def _column(rows: Any) -> _Column:
    orders, steps, values, times = rows
    return _Column(orders.astype(np.int64), steps.astype(np.int64), values, times)


def _table(file: Path, known: Collection[str]) -> _File:
    """The points of a `metrics.csv`, without metrics that an event file has, as that also has their times.

    A last line that was cut short is left out.
    """
    if not file.exists():
        return _File({})
    points: dict[str, list[tuple[int, int, float]]] = {}
    with open_csv(file) as rows:
        left_out = {*_NO_COLUMN, *known}
        lists = [(place, points.setdefault(name, [])) for name, place in rows.columns.items() if name not in left_out]
        for number, (step, row) in enumerate(rows):
            for place, of_name in lists:
                if row[place] and (value := number_of(row[place])) is not None:
                    of_name.append((number, step, value))
        problem = rows.problem()
    tables = {name: np.array(of_name, dtype=np.float64).T for name, of_name in points.items() if of_name}
    columns = {name: _column([*table, np.full(table.shape[1], np.nan)]) for name, table in tables.items()}
    return _File(columns, problem=problem)
