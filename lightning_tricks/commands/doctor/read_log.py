"""All metrics of one run from its folder: event files, `metrics.csv`, ledger, recipe. Imports no torch."""

import csv
import mmap
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._errors import UsageError
from lightning_tricks._suggest import did_you_mean
from lightning_tricks.commands.doctor.scalar_records import read_scalars
from lightning_tricks.commands.runs.event_file import Records, values_of
from lightning_tricks.commands.runs.read_run import event_files, flat, is_run, number_of, read_yaml, step_of
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
    table = folder / "metrics.csv"
    return [*event_files(folder), *([table] if table.is_file() else [])]


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
        except (OSError, ValueError, csv.Error) as error:
            unread.append(f"{file.name}: {getattr(error, 'strerror', None) or error}")
    points = _Points(files)
    metrics = dict(points.series)
    if not metrics:
        why = f" ({'; '.join(unread)})" if unread else ""
        raise UsageError(f"{command}: {folder}: its log holds no scalars{why}: give the log of a training run")
    for role, name in names.items():
        if name not in metrics:
            raise UsageError(
                f"{command}: names={role}={name}{did_you_mean(name, metrics)}: it was not logged in {folder}; there "
                f"are {_some(metrics)}"
            )
    log = RunLog(metrics, dict(names), settings=_settings(folder))
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


def _settings(folder: Path) -> Mapping[str, Any]:
    return flat(read_yaml(folder / "config.yaml") or read_yaml(folder / "hparams.yaml"))


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
            marks = [step for _, step in file.resumed] + ([int(column.steps[0])] if column is not None else [])
            kept = steps < min(marks) if marks else np.ones(len(steps), bool)
            steps, values, times = steps[kept], values[kept], times[kept]
            if column is None:
                continue
            own = np.ones(len(column.steps), bool)
            for order, step in file.resumed:
                own &= (column.orders > order) | (column.steps < step)
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
    if file.stat().st_size == 0:
        return _File({})  # a run that has logged nothing yet
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        records = Records(data)
        if not records.starts:
            raise ValueError("no event file, or cut off in its first record")
        scalars = read_scalars(records)
        found = _File({})
        lists: dict[str, list[tuple[int, int, float, float]]] = {}
        for number in scalars.others:
            event = records.parse(number)
            if event is None:
                continue
            if event.HasField("session_log") and event.step > 0:
                found.resumed.append((number, int(event.step)))
            for name, value in values_of(event).items():
                lists.setdefault(name, []).append((number, int(event.step), value, float(event.wall_time)))
    for name, column in scalars.columns.items():
        lists_of_name = np.array(lists.pop(name, []), dtype=np.float64).reshape(-1, 4).T
        joined = [np.concatenate(pair) for pair in zip(column, lists_of_name, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        found.columns[name] = _column([each[order] for each in joined])
    for name, points in lists.items():
        found.columns[name] = _column(np.array(points, dtype=np.float64).T)
    for name in [name for name in found.columns if name.startswith(_NOT_METRICS)]:
        del found.columns[name]
    return found


def _column(rows: Any) -> _Column:
    orders, steps, values, times = rows
    return _Column(orders.astype(np.int64), steps.astype(np.int64), values, times)


def _table(file: Path, known: Collection[str]) -> _File:
    """The points of a `metrics.csv`, without metrics that an event file has, as that also has their times.

    A last line that was cut short is left out.
    """
    if not file.is_file():
        return _File({})
    points: dict[str, list[tuple[int, int, float]]] = {}
    with file.open(encoding="utf-8", errors="replace", newline="") as opened:
        rows = csv.reader(line for line in opened if line.endswith("\n"))
        header = next(rows, [])
        lists = [
            (index, points.setdefault(name, []))
            for index, name in enumerate(header)
            if name not in (*_NO_COLUMN, *known)
        ]
        step_at = header.index("step") if "step" in header else -1
        for number, row in enumerate(rows if step_at >= 0 else ()):
            if len(row) != len(header) or (step := step_of(row[step_at])) is None:
                continue
            for index, of_name in lists:
                if row[index] and (value := number_of(row[index])) is not None:
                    of_name.append((number, step, value))
    tables = {name: np.array(of_name, dtype=np.float64).T for name, of_name in points.items() if of_name}
    return _File({name: _column([*table, np.full(table.shape[1], np.nan)]) for name, table in tables.items()})
