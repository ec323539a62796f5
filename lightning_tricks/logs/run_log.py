"""What a run has logged, by the role of each metric, and the robust figures that the symptoms are made of. No torch."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import printable, shell_word
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks.logs.ledger_file import NAME as LEDGER
from lightning_tricks.logs.ledger_file import read_ledger
from lightning_tricks.logs.run import Run, read_run
from lightning_tricks.logs.scalars import ROLES, check_roles

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SPEED = "steps per second, by the times of the log"
_WORK = re.compile(r"batch_size|seq_?len|sequence_length|context_length|tokens_per_(step|batch)")
_WORDS = {"loss": "training loss", "val_loss": "validation loss"}


@dataclass(frozen=True)
class Series:
    """The points of one metric in the order of their steps.

    Args:
        steps: (n,) optimizer steps as logged: 0 for the first.
        values: (n,) values, which may be NaN or infinite.
    """

    steps: Ints
    values: Floats

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Series":
        """The series of values by step."""
        steps = sorted(points)
        return cls(np.array(steps, dtype=np.int64), np.array([points[step] for step in steps], dtype=np.float64))

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> "Series":
        """The points whose values are finite."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])

    def between(self, first: float, end: float) -> "Series":
        """The points at steps from `first` to before `end`."""
        kept = (self.steps >= first) & (self.steps < end)
        return Series(self.steps[kept], self.values[kept])

    def last_part(self, fraction: float) -> "Series":
        """The last points, a fraction of all."""
        start = len(self) - math.ceil(len(self) * fraction)
        return Series(self.steps[start:], self.values[start:])


@dataclass
class RunLog:
    """All that is known of a run; what is missing is empty.

    Args:
        metrics: by the names as logged.
        names: the name as logged of each role; those that are missing have the first name of `ROLES` that was logged.
        restarts: first steps of the processes that resumed the run, as logged: 20 after a checkpoint of 20 steps.
        batches: checksum of each step's batch, of a ledger.
        settings: of the recipe, by dotted names such as `trainer.gradient_clip_val`.
        times: seconds since 1970 at the points of the loss, where the log has times.
        began: the same of its first record.
        printed: lines that the run has printed, such as those of an error.
    """

    metrics: Mapping[str, Series] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    batches: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    times: Series = field(default_factory=lambda: Series.of({}))
    began: float | None = None
    printed: Sequence[str] = ()

    def __post_init__(self) -> None:
        for role, names in ROLES.items():
            found = next((name for name in names if len(self.metrics.get(name, ()))), None)
            if role not in self.names and found is not None:
                self.names[role] = found

    def __getitem__(self, role: str) -> Series:
        """The series of a role; an empty one where it was not logged."""
        return self.metrics.get(self.name(role), Series.of({}))

    def name(self, role: str) -> str:
        """The metric's own name, for text."""
        return self.names.get(role, ROLES[role][0])

    def like(self, start: str, end: str) -> dict[str, Series]:
        """The metrics named `<start>PART<end>`, by PART."""
        return {
            name[len(start) : -len(end)]: series
            for name, series in self.metrics.items()
            if name.startswith(start) and name.endswith(end)
        }

    def steps(self) -> int:
        """Number of optimizer steps done, as far as the training loss tells."""
        return int(self["loss"].steps[-1]) + 1 if len(self["loss"]) else 0

    def since_change(self, series: Series) -> Series:
        """The points since the last logged change of the size of batches or of the length of rows, if it is rare."""
        work = (each.finite() for name, each in self.metrics.items() if _WORK.search(name))
        changes = [(each, each.steps[1:][np.diff(each.values) != 0]) for each in work]
        last = [int(steps[-1]) for each, steps in changes if 0 < len(steps) <= len(each) / 10]
        return series.between(max(last, default=0), math.inf)

    def clip_norm(self) -> float:
        """The norm to which gradients are clipped; 0 where it is not known, or values are clipped."""
        limit = self["clip_norm"].values[-1] if len(self["clip_norm"]) else self.setting("trainer.gradient_clip_val")
        by_value = self.setting("trainer.gradient_clip_algorithm") == "value"
        return float(limit) if isinstance(limit, int | float) and not by_value else 0.0

    def setting(self, *names: str) -> Any:
        """The first of these settings that the recipe has; None without."""
        return next((self.settings[name] for name in names if self.settings.get(name) is not None), None)


def read_log(
    folder: Path,
    names: Mapping[str, str] | None = None,
    needed: Sequence[str] = ("loss",),
    command: str = "doctor",
    run: Run | None = None,
) -> tuple[RunLog, list[str]]:
    """What a run has logged, and a line for each file that could not be read.

    Args:
        folder: of the run.
        names: of metrics, by their roles in `ROLES`, where they are other ones.
        needed: roles of which one must have been logged.
        command: that asks, for its error lines.
        run: the same run with all metrics, if it has been read.

    Raises:
        UsageError: an unknown role or name; nothing can be read; none of `needed` was logged.
    """
    names = dict(names or {})
    check_roles(names)
    run = run or read_run(folder, all_metrics=True)
    scalars, unread = run.scalars, list(run.unread)
    metrics = {
        name: Series(np.frombuffer(points.steps, np.int64), np.frombuffer(points.values, np.float64))
        for name, points in scalars.metrics.items()
    }
    if not metrics:
        reasons = f" ({'; '.join(scalars.facts.unread)})" if scalars.facts.unread else ""
        raise UsageError(f"{command}: {folder}: its log holds no scalars{reasons}: give the log of a training run")
    for role, name in names.items():
        if name not in metrics:
            raise UsageError(
                f"{command}: names={role}={name}{did_you_mean(name, metrics)}: it was not logged in {folder}; there "
                f"are {_some(metrics)}"
            )
    log = RunLog(metrics, names, settings=run.settings)
    if (found := next((role for role in needed if role in log.names), None)) is None:
        words = " or ".join(_WORDS[role] for role in needed)
        likely = next((name for name in metrics if needed[0].partition("_")[0] in name), next(iter(metrics)))
        raise UsageError(
            f"{command}: {folder}: no {words} among {_some(metrics)}: name it, such as "
            f"--names {shell_word(f'{needed[0]}={likely}')}"
        )
    points = scalars.metrics[log.names[found]]
    log.restarts = sorted(step for step in points.restarts.union(scalars.resumes) if step > 0)
    steps, times = metrics[log.names[found]].steps, np.frombuffer(points.times, np.float64)
    log.times, log.began = Series(steps, times).finite(), scalars.facts.first_time
    if "speed" not in log.names and (known := np.diff(times) > 0).any():
        speed = Series(steps[1:][known], np.diff(steps)[known] / np.diff(times)[known])
        log.metrics, log.names["speed"] = {**metrics, _SPEED: speed}, _SPEED
    if (folder / LEDGER).is_file():
        _add_ledger(log, folder, unread)
    return log, unread


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(printable, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _add_ledger(log: RunLog, folder: Path, unread: list[str]) -> None:
    try:
        ledger = read_ledger(folder)
    except UsageError as error:
        unread.append(str(error))
        return
    log.restarts = sorted({*log.restarts, *(start["start"] for start in ledger.starts if start.get("start"))})
    log.batches = {step: line["batch"] for step, line in ledger.steps.items() if line.get("batch") is not None}


# ---- robust figures

TO_SIGMA = 1.4826  # the standard deviation of normal values, in medians of their distances from the median


def noise(values: Floats) -> float:
    """Standard deviation of a series around its trend, from the median distance of neighbours; a jump counts once.

    Example:
        >>> round(noise(np.array([1.0, 2.0, 1.0, 2.0, 1.0])), 4)
        1.0484
    """
    if len(values) < 2:
        return 0.0
    return float(TO_SIGMA * np.median(np.abs(np.diff(values))) / math.sqrt(2.0))


def bins(values: Floats, number: int) -> Floats:
    """Medians of `number` parts of equal length, in their order; fewer if there are fewer values."""
    return np.array([np.median(part) for part in np.array_split(values, min(number, len(values)))])


def bin_error(values: Floats, number: int) -> float:
    """Standard error of each of the `bins`: that of a median is 1.25 times that of a mean."""
    return 1.2533 * noise(values) / math.sqrt(max(len(values) / number, 1.0))


def kendall(values: Floats) -> float:
    """Kendall's tau of values with their order: 1 where each is above all before it, -1 where each is below."""
    pairs = [np.sign(values[i + 1 :] - values[i]).sum() for i in range(len(values) - 1)]
    return float(sum(pairs) / (len(values) * (len(values) - 1) / 2)) if pairs else 0.0


def above_surroundings(values: Floats, half: int) -> Floats:
    """Each value less the median of the `half` before it, itself and the `half` after it; NaN at both ends."""
    above = np.full(len(values), math.nan)
    if len(values) > 2 * half:
        windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
        above[half : len(values) - half] = values[half : len(values) - half] - np.median(windows, axis=1)
    return above


def shown_steps(steps: Iterable[int], most: int = 4) -> str:
    """Steps as text: `step 3`, `steps 3, 5, 8, 9 and 12 more`."""
    listed = [int(step) for step in steps]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"step{'s' * (len(listed) != 1)} " + ", ".join(map(str, listed[:most])) + rest
