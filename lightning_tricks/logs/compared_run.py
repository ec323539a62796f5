"""The runs of a comparison, and groups of them: what each has logged, and had cost by any step. No torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.run import Run, find_runs
from lightning_tricks.logs.run_log import Floats, Ints, RunLog, Series, read_log

AXES: Mapping[str, str] = {  # and what a log needs for them
    "steps": "",
    "tokens": "rows, length and devices in config.yaml, or MFUMonitor",
    "flops": "MFUMonitor",
    "hours": "GoodputMonitor, or an event file",
}
OUTCOMES = ("val_loss", "loss")  # roles of what is compared, the first that all runs have
_BATCH = "train/batch_tokens"
_STEP_SECONDS = "throughput/step_seconds"
_FLOPS_PER_SECOND = "throughput/model_flops_per_second"  # of one device
_TOKENS_PER_SECOND = "throughput/tokens_per_second"
_OF_DEVICE = "throughput/tokens_per_second_per_device"
_PLACES = ("dirpath", "cache_dir", "save_dir", "log_dir", "root_dir", "num_workers")  # ends of names: no result's cause


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Args:
        run: its figures as `runs` has them, with a name that tells it from the others.
        log: all that it has logged.
        argument: number of the argument of the command line that named it.
    """

    run: Run
    log: RunLog
    argument: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.run.name

    @property
    def settings(self) -> dict[str, Any]:
        """What may have made its result another, by dotted names; empty if there is none on file."""
        return {name: value for name, value in self.run.settings.items() if _last(name) not in _PLACES}

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings without seeds."""
        return {name: value for name, value in self.settings.items() if not is_seed(name)}

    @property
    def seeds(self) -> dict[str, Any]:
        """The seeds among the settings."""
        return {name: value for name, value in self.settings.items() if is_seed(name) and value is not None}

    @cached_property
    def amounts(self) -> "dict[str, Amounts | None]":
        """What it had cost by any number of steps, by axis; None where its log does not tell."""
        steps = Amounts.at_rate(1.0, self.steps)
        return {"steps": steps, "tokens": self._tokens(), "flops": self._flops(), "hours": self._hours()}

    @property
    def steps(self) -> int:
        """Optimizer steps done, as far as any metric or checkpoint tells."""
        logged = (int(series.steps[-1]) + 1 for series in self.log.metrics.values() if len(series))
        return max(self.run.steps or 0, *logged)

    def _tokens(self) -> "Amounts | None":
        if len(batches := self._metric(_BATCH)):
            whole = len(batches) == self.steps and batches.steps[-1] == self.steps - 1
            return Amounts(np.arange(self.steps + 1), np.append(0.0, np.cumsum(batches.values))) if whole else None
        if self.run.tokens and self.run.steps:
            return Amounts.at_rate(self.run.tokens / self.run.steps, self.steps)
        return self._from_rate(_TOKENS_PER_SECOND)

    def _flops(self) -> "Amounts | None":
        """Per device as logged, times the devices, whose number is the ratio of two figures of the log."""
        all_devices, device = self._metric(_TOKENS_PER_SECOND).finite(), self._metric(_OF_DEVICE).finite()
        steps, own, other = np.intersect1d(all_devices.steps, device.steps, return_indices=True)
        if not len(steps):
            return None
        return self._from_rate(
            _FLOPS_PER_SECOND, round(float(np.median(all_devices.values[own] / device.values[other])))
        )

    def _from_rate(self, rate: str, times: int = 1) -> "Amounts | None":
        """The amounts by a rate of intervals; between two of them, the amounts of steps lie on a straight line."""
        rates, seconds = self._metric(rate).finite(), self._metric(_STEP_SECONDS).finite()
        steps, own, other = np.intersect1d(rates.steps, seconds.steps, return_indices=True)
        if not len(steps):
            return None
        of_intervals = times * rates.values[own] * seconds.values[other]
        # sums over the steps before the first interval, between two, and behind the last: steps may be 1e12
        between = np.diff(steps) * of_intervals[:-1] + np.diff(of_intervals) * (np.diff(steps) + 1) / 2
        amounts = np.cumsum([0.0, (steps[0] + 1) * of_intervals[0], *between])
        done = np.append(0, steps + 1)
        if (left := self.steps - int(done[-1])) > 0:
            done, amounts = np.append(done, self.steps), np.append(amounts, amounts[-1] + left * of_intervals[-1])
        return Amounts(done, amounts)

    def _hours(self) -> "Amounts | None":
        seconds = self._metric("goodput/wall_seconds").finite()
        if not len(seconds):
            times = self.log.times
            seconds = Series(times.steps, times.values - (self.log.began or times.values[:1]))
        if len(seconds) < 2:
            return None
        return Amounts(np.append(0, seconds.steps + 1), np.append(0.0, seconds.values / 3600))

    def _metric(self, name: str) -> Series:
        return self.log.metrics.get(name, Series.of({}))


@dataclass(frozen=True)
class Amounts:
    """What a run had cost after some numbers of optimizer steps, and on straight lines between them.

    Args:
        steps: (n,) numbers of steps, the first 0, ascending.
        amounts: (n,) what they had cost, which never falls.
    """

    steps: NDArray[Any]
    amounts: Floats

    @classmethod
    def at_rate(cls, each: float, steps: int) -> "Amounts":
        """Of steps that cost the same."""
        return cls(np.array([0, steps]), np.array([0.0, each * steps]))

    def after(self, steps: Ints | Floats) -> Floats:
        """The amounts after numbers of steps."""
        return np.interp(steps, self.steps, self.amounts)

    def each(self) -> Floats:
        """What one step has cost, from each of the numbers of steps to the next."""
        return np.diff(self.amounts) / np.diff(self.steps)


def axis_text(name: str) -> str:
    """The name of an axis for people."""
    return "FLOPs" if name == "flops" else name


def axis_unit(name: str, largest: float) -> tuple[float, str]:
    """The unit of an axis for amounts up to the largest, as a part of the axis's own, and its name for people."""
    if name != "hours" or largest >= 0.1:
        return 1.0, axis_text(name)
    return (1 / 60, "minutes") if largest >= 0.05 else (1 / 3600, "seconds")


def is_seed(name: str) -> bool:
    """Whether a setting is a seed, by the end of its dotted name.

    Example:
        >>> is_seed("seed_everything"), is_seed("data.seed"), is_seed("data.seed_length")
        (True, True, False)
    """
    last = _last(name)
    return last in ("seed", "seed_everything") or last.endswith("_seed")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def read_runs(arguments: Sequence[str], names: Mapping[str, str]) -> tuple[list[ComparedRun], list[str]]:
    """The runs of folders, in their order, and a line for whatever was left out.

    Args:
        arguments: folders of runs, or folders with several runs.
        names: of metrics by their roles, as `doctor` takes them.

    Raises:
        UsageError: no such folder, no run in it, a run that is named twice, fewer than two runs with a log, or no log
            of the first folder, with which the others are compared.
    """
    found: list[ComparedRun] = []
    lines: list[str] = []
    errors: list[UsageError] = []
    by_place: dict[Path, str] = {}
    for number, argument in enumerate(arguments):
        before = len(found)
        for run in find_runs(Path(argument), names, "compare", all_metrics=True):
            folder = run.folder
            if (place := folder.resolve()) in by_place:
                again = f"{folder} is {by_place[place]}" if str(folder) != by_place[place] else str(folder)
                raise UsageError(f"compare: {again}, named twice: name another run")
            by_place[place] = str(folder)
            try:
                log, unread = read_log(folder, names, OUTCOMES, "compare", run)
            except UsageError as error:
                errors.append(error)
                lines.append(f"left out: {str(error).removeprefix('compare: ').partition(': give ')[0]}")
                continue
            lines += [f"not read: {folder}: {line}" for line in unread]
            found.append(ComparedRun(run, log, number))
        if len(found) == before and folder != Path(argument):
            why = lines[-1].removeprefix("left out: ")
            errors.append(UsageError(f"compare: {argument}: no run below it has a log: {why}: give another folder"))
        if not found or (errors and number == len(arguments) - 1 and len(found) < 2):
            raise errors[-1]  # none is left, or none that the others would be compared with
    if len(found) < 2:
        raise UsageError(f"compare: {found[0].run.folder}: one run alone: name another, or a folder with several")
    shared = os.path.commonpath([each.run.folder.absolute() for each in found])  # names are the paths from there
    names_of = (os.path.relpath(each.run.folder.absolute(), shared) for each in found)
    return [replace(each, run=replace(each.run, name=name)) for each, name in zip(found, names_of, strict=True)], lines


def outcome_of(run: ComparedRun, metric: str, width: int = 0) -> Series:
    """What is compared, by the number of optimizer steps done: a validation metric, or means of the training loss.

    Values that are not finite are left out, unless all are.

    Args:
        metric: its name as logged.
        width: number of steps whose mean is one point, for a metric of each step; 0 for the points as they are.
    """
    series = run.log.metrics[metric]
    series = series.finite() if len(series.finite()) else series
    if not width:
        return Series(series.steps + 1, series.values)
    blocks = series.steps // width
    ends, starts = np.unique(blocks, return_index=True)
    means = np.add.reduceat(series.values, starts) / np.diff(np.append(starts, len(series)))
    done = np.minimum((ends + 1) * width, int(series.steps[-1]) + 1)
    return Series(done, means)


def value_at(steps: Ints, values: Floats, places: Floats, place: float) -> float | None:
    """The value at an amount, on the straight line between the two nearest points; None outside of them."""
    if not len(steps) or not places[0] <= place * (1 + 1e-9) or place > places[-1] * (1 + 1e-9):
        return None
    return float(np.interp(place, places, values))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone.

    Args:
        letter: A for the first.
        runs: of it.
        seeds: what tells each run's seed from the others; equal for a run that was repeated.
    """

    letter: str
    runs: tuple[ComparedRun, ...]
    seeds: tuple[str, ...]

    @property
    def n_seeds(self) -> int:
        """Number of different seeds."""
        return len(set(self.seeds))

    def by_seed(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values of its runs, by their names, as one for each seed: repeats of a seed are no further seeds."""
        found: dict[str, list[float]] = {}
        for seed, run in zip(self.seeds, self.runs, strict=True):
            found.setdefault(seed, []).append(values[run.name])
        return {seed: float(np.mean(of_seed)) for seed, of_seed in found.items()}


def groups_of(runs: Sequence[ComparedRun], by: str) -> list[Group]:
    """The groups in the order of their first runs.

    Runs without settings on file are groups of their own, unless folders decide.
    """
    parts: dict[str, list[ComparedRun]] = {}
    for run in runs:
        own = f"run {run.name}"
        key = own if by == "runs" or not run.settings else repr(sorted(run.recipe.items()))
        parts.setdefault(f"argument {run.argument}" if by == "folders" else key, []).append(run)
    return [Group(_letter(number), tuple(part), tuple(_seeds(part))) for number, part in enumerate(parts.values())]


def _letter(number: int) -> str:
    """A to Z, then A2 and so on."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def _seeds(part: Sequence[ComparedRun]) -> Iterator[str]:
    """A key of each run's seed: its settings that are seeds; without these, runs with an equal loss are one."""
    for run in part:
        if run.seeds:
            yield repr(sorted(run.seeds.items()))
        else:
            series = run.log["val_loss"] if len(run.log["val_loss"]) else run.log["loss"]
            yield f"loss {hash((series.steps.tobytes(), series.values.tobytes()))}"
