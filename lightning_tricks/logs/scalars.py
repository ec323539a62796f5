"""The metrics of one run from its folder, of event files and `metrics.csv`: the reader of all logs. No torch."""

import math
import re
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import LARGEST_STEP, number_of, open_csv, why
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks.logs.event_file import Facts, read_events

_NOT_METRICS = ("_overview/", "hp/", "hp_metric", "epoch", "_hparams_/")  # how their names begin
_EVALUATION = re.compile(r"(^|[/_])(val|valid|validation|test|eval|predict)([/_]|$)")  # in the name of a metric
_NO_COLUMN = ("step", "epoch", "")
ROLES: Mapping[str, tuple[str, ...]] = {  # the names under which loggers have each metric, the likeliest first
    "loss": ("train/loss", "train_loss", "train/loss_step", "train_loss_step", "training_loss", "loss"),
    "val_loss": (
        "val/loss", "val_loss", "valid/loss", "valid_loss", "validation/loss", "val/loss_epoch", "val_loss_epoch",
    ),
    "grad_norm": ("train/grad_norm", "grad_norm", "grad_2.0_norm_total"),
    "lr": ("train/lr", "lr", "learning_rate", "lr-AdamW", "lr-Adam", "lr-SGD"),
    "clip_norm": ("train/clip_norm",),
    "speed": (
        "throughput/tokens_per_second", "throughput/samples_per_second", "tokens_per_second",
        "device/samples_per_sec", "device/batches_per_sec",
    ),
    "loss_scale": ("precision/loss_scale", "loss_scale"),
    "skipped_steps": ("precision/skipped_steps",),
    "guarded_steps": ("guard/skipped_steps",),
    "mfu": ("throughput/mfu", "device/mfu"),
    "data_share": ("goodput/data",),
    "step_share": ("goodput/steps",),
    "optimizer_step": ("doctor/optimizer_step",),
}  # fmt: skip


def check_roles(names: Mapping[str, str]) -> None:
    """Refuse the name of a metric for a role that is none.

    Raises:
        UsageError: names the role and those that there are.
    """
    for role, name in names.items():
        if role not in ROLES:
            raise UsageError(f"names: {role}={name}{did_you_mean(role, ROLES)}: the roles are {', '.join(ROLES)}")


_ARRAYS = ("steps", "values", "times", "_marks")


@dataclass
class Points:
    """One metric.

    Args:
        steps: as logged, 0 for the first, ascending once all files are read.
        values: of these steps; of a step that was repeated, the last one.
        times: seconds since 1970 at which they were written; NaN where the file has no times.
        restarts: steps at which it went on after a restart: in a later file, or where steps go back
            to one that was there.
    """

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    times: "array[float]" = field(default_factory=lambda: array("d"))
    restarts: set[int] = field(default_factory=set)
    _marks: "array[int]" = field(default_factory=lambda: array("q"))  # number of resumes written before each point
    _highest: int = -1
    _backs: list[int] = field(default_factory=list)  # places of points that come after one of a higher step
    _is_sorted: bool = True

    def __len__(self) -> int:
        return len(self.steps)

    def by_step(self) -> dict[int, float]:
        """The values by their steps."""
        return dict(zip(self.steps, self.values, strict=True))

    def join(self, later: "Points") -> None:
        """Go on with the points of a later file, which repeats the steps from its first one on."""
        step = later.steps[0]
        if step > self.steps[0]:
            self.restarts.add(step)
        if step <= self._highest:
            self._keep([known < step for known in self.steps])
        self._highest = max(max(self.steps, default=-1), later._highest)
        self._is_sorted &= later._is_sorted
        for name in _ARRAYS:
            getattr(self, name).extend(getattr(later, name))

    def add(self, step: int, value: float, time: float, marks: int) -> None:
        """Add a point."""
        if step > self._highest:
            self._highest = step
        else:
            self._is_sorted = False
            if step < self.steps[-1]:
                self._backs.append(len(self.steps))
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)
        self._marks.append(marks)

    def end_file(self) -> None:
        """Tell restarts, which repeat a step, from steps out of order."""
        if self._backs:
            first = {self.steps[place]: place for place in reversed(range(len(self)))}
            self.restarts |= {self.steps[place] for place in self._backs if first[self.steps[place]] < place}
            self._backs = []

    def finish(self, ends: "list[int]") -> None:
        """Keep what counts: of the points before each resume those below `ends`; of each step the last one."""
        self.end_file()
        if len(ends) > 1:
            self._keep([step < ends[marks] for step, marks in zip(self.steps, self._marks, strict=True)])
        if not self._is_sorted:
            last = {step: place for place, step in enumerate(self.steps)}
            order = [last[step] for step in sorted(last)]
            self.steps = array("q", map(self.steps.__getitem__, order))
            self.values = array("d", map(self.values.__getitem__, order))
            self.times = array("d", map(self.times.__getitem__, order))
        self._marks = array("q")

    def _keep(self, kept: "list[bool]") -> None:
        if not all(kept):
            for name in _ARRAYS:
                old = getattr(self, name)
                setattr(self, name, array(old.typecode, [each for each, keep in zip(old, kept, strict=True) if keep]))


@dataclass
class Scalars:
    """What a run's log says.

    Args:
        metrics: by their names, those that were asked for.
        steps: number of optimizer steps done, as far as the log tells.
        resumes: steps from which on a resume made TensorBoard forget earlier points.
        facts: what the files say beside their points, and what of them could not be read.
    """

    metrics: dict[str, Points] = field(default_factory=dict)
    steps: int | None = None
    resumes: list[int] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        points = self.metrics.get(name)
        return points.values[-1] if points else None

    def series(self, name: str) -> Mapping[int, float]:
        """The values of a metric by their steps."""
        return self.metrics[name].by_step() if name in self.metrics else {}


def event_files(folder: Path) -> list[Path]:
    """TensorBoard's files of a run, in the order in which they were begun."""
    return sorted(folder.glob("events.out.tfevents.*"))


def read_scalars(folder: Path, names: Collection[str] | None = None) -> Scalars:
    """The log in a folder: its event files in the order of their names, then what `metrics.csv` has beside them.

    A file that is cut off counts up to there.

    Args:
        folder: of a run.
        names: of the metrics that are wanted; None for all.
    """
    found = Scalars()
    table = folder / "metrics.csv"
    for file in (*event_files(folder), *([table] if table.exists() else [])):
        try:
            (_read_table if file == table else _read_events)(file, names, found)
        except (OSError, ValueError) as error:
            found.facts.unread.append(f"{file.name}: {why(error)}")
    ends = [LARGEST_STEP + 1]
    for step in reversed(found.resumes):  # of the points before each mark, those from its step on do not count
        ends.append(min(step, ends[-1]))
    ends.reverse()
    for points in found.metrics.values():
        points.finish(ends)
    found.metrics = {name: points for name, points in found.metrics.items() if points}
    return found


def _read_events(file: Path, names: Collection[str] | None, found: Scalars) -> None:
    """Add the points of a file; those of a validation after training only where training has no such metric."""
    of_file: dict[str, Points] = {}
    steps_before = found.steps
    for tag, step, value, time in read_events(file, found.facts):
        if tag is None:
            found.resumes.append(step)
            found.steps = step
            continue
        if (points := of_file.get(tag)) is None:
            if tag.startswith(_NOT_METRICS):
                continue
            points = of_file[tag] = Points()
        found.steps = step + 1
        if names is None or tag in names:
            points.add(step, value, time, len(found.resumes))
    trains = steps_before is None or not all(map(_EVALUATION.search, of_file))
    found.steps = found.steps if trains else steps_before
    for tag, points in of_file.items():
        points.end_file()
        if points and tag not in found.metrics:
            found.metrics[tag] = points
        elif points and trains:
            found.metrics[tag].join(points)


def _read_table(file: Path, names: Collection[str] | None, found: Scalars) -> None:
    """The columns that no event file has, as those also have the times."""
    known, done = set(found.metrics), None
    with open_csv(file) as rows:
        wanted = [
            (place, found.metrics.setdefault(name, Points()))
            for name, place in rows.columns.items()
            if name not in _NO_COLUMN and name not in known and (names is None or name in names)
        ]
        for step, row in rows:
            done = step + 1
            for place, points in wanted:
                if row[place] and (value := number_of(row[place])) is not None:
                    points.add(step, value, math.nan, len(found.resumes))
        if (problem := rows.problem()) is not None:
            found.facts.unread.append(f"{file.name}: {problem}")
    if found.steps is None:
        found.steps = done
