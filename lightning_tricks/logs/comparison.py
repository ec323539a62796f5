"""The values of groups of runs at equal amounts, and what may be said of each difference.

A statement on settings needs the spread that other seeds make. It comes from the groups with two seeds or more, or is
given; without it, two runs are described, and no more is said.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.compared_run import (
    AXES,
    OUTCOMES,
    ComparedRun,
    Group,
    axis_text,
    groups_of,
    is_seed,
    outcome_of,
    value_at,
)
from lightning_tricks.logs.intervals import Interval, paired, pooled_spread, welch, with_spread
from lightning_tricks.logs.run import BITS, differing
from lightning_tricks.logs.run_log import Floats, Series
from lightning_tricks.logs.table import setting_text

LEVEL = 0.95  # that all intervals of one comparison hold the true differences, together
_TRAIN_POINTS = 20  # means of the training loss over the shortest run, where it stands for a validation
_SAME = 1e-3  # relative difference of amounts a step that counts as none
_FULL = 0.99  # of a run's steps: below that, its schedule had not ended
_PAIRS = 3  # seeds in common from which on differences are taken seed by seed
_TOKENIZERS = ("vocab_size", "tokenizer", "tokenizer_file")  # ends of settings that decide what a token is
# which the validation rows do not follow
_ROWS_OF_TRAINING = ("data.micro_batch_size", "data.skip_samples", "data.packing", "data.shuffle")

Verdict = Literal["better", "worse", "no difference", "not known"]


@dataclass(frozen=True)
class Row:
    """The groups at one place.

    Args:
        name: `last`, `best`, or an axis.
        place: the amount that all have; None for `last` and `best`.
        values: of each run, by its name; NaN where its loss was not finite.
        means: of each group.
        spreads: standard deviation over the seeds of each group, None for one seed.
        intervals: of each group less the first; None for the first, and where nothing tells what seeds make.
    """

    name: str
    place: float | None
    values: dict[str, float]
    means: list[float]
    spreads: list[float | None]
    intervals: list[Interval | None]

    def difference(self, group: int) -> float:
        """A group less the first."""
        return self.means[group] - self.means[0]


@dataclass
class Comparison:
    """Runs side by side.

    Args:
        runs: two or more.
        groups: of them, one or more.
        metric: what is compared, as logged, of each run; lower is better.
        is_validation: False for means of the training loss.
        at: name of the row on which the verdicts are; None for steps, or tokens where batches differ, or `last` where
            one run had ended before the first point of another.
        seed_noise: standard deviation over seeds that was given.
    """

    runs: list[ComparedRun]
    groups: list[Group]
    metrics: dict[str, str]
    is_validation: bool
    at: str | None = None
    seed_noise: float | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: dict[str, Series] = field(default_factory=dict)  # by the names of runs, over steps done

    def __post_init__(self) -> None:
        width = 0 if self.is_validation else max(min(run.steps for run in self.runs) // _TRAIN_POINTS, 1)
        self.outcomes = {run.name: outcome_of(run, self.metrics[run.name], width) for run in self.runs}
        self.known = [axis for axis in AXES if all(run.amounts[axis] is not None for run in self.runs)]
        for name in (*self.known, "last", "best"):
            if (row := self._row(name)) is not None:
                self.rows[name] = row
        if self.at is None:
            other_batches = "tokens" in self.rows and not self.amount_of_step("tokens")
            self.at = "tokens" if other_batches else "steps" if "steps" in self.rows else "last"
        if self.at not in self.rows:
            need = f" ({AXES[self.at]})" if AXES.get(self.at) else ""
            raise UsageError(f"compare: at={self.at}: not known of all runs{need}: give one of {', '.join(self.rows)}")

    @property
    def metric(self) -> str:
        """The metric's name, or names."""
        return ", ".join(dict.fromkeys(self.metrics.values()))

    @property
    def level(self) -> float:
        """That of each interval, so that all together hold with `LEVEL` (Bonferroni)."""
        return 1 - (1 - LEVEL) / max(len(self.groups) - 1, 1)

    @property
    def row(self) -> Row:
        """That of the verdicts."""
        assert self.at is not None
        return self.rows[self.at]

    def amount_of_step(self, axis: str) -> float | None:
        """The amount of one step, where it is the same in all of all runs: then the axis shows what steps show."""
        rates = []
        for run in self.runs:
            amounts = run.amounts[axis]
            if amounts is None:
                return None
            each = amounts.each()
            rates += [float(each.min()), float(each.max())]
        return rates[0] if max(rates) - min(rates) <= _SAME * max(rates) else None

    def places(self, run: ComparedRun, axis: str, outcome: Series | None = None) -> Floats:
        """The amounts at which a run's outcome, or a part of it, is known."""
        amounts = run.amounts[axis]
        assert amounts is not None
        return amounts.after((self.outcomes[run.name] if outcome is None else outcome).steps)

    def has_failed(self, run: ComparedRun) -> bool:
        """Whether its loss was not finite at the end."""
        return run.run.state == "failed" or not math.isfinite(run.log.metrics[self.metrics[run.name]].values[-1])

    def _row(self, name: str) -> Row | None:
        place = None
        if name in AXES:
            going = [run for run in self.runs if not self.has_failed(run)] or self.runs
            place = float(min(self.places(run, name)[-1] for run in going))
        values: dict[str, float] = {}
        for run in self.runs:
            if (value := self._value(run, name, place)) is None:
                return None
            values[run.name] = value
        by_seed = [group.by_seed(values) for group in self.groups]
        lists = [list(seeds.values()) for seeds in by_seed]
        means = [float(np.mean(one)) for one in lists]
        spreads = [float(np.std(one, ddof=1)) if len(one) > 1 else None for one in lists]
        intervals = [None, *(self._interval(by_seed, number) for number in range(1, len(self.groups)))]
        return Row(name, place, values, means, spreads, intervals)

    def _value(self, run: ComparedRun, name: str, place: float | None) -> float | None:
        outcome = self.outcomes[run.name]
        if name == "best":
            return float(outcome.values.min())
        if self.has_failed(run):
            return math.nan
        if place is None:
            return float(outcome.values[-1])
        return value_at(outcome.steps, outcome.values, self.places(run, name), place)

    def _interval(self, by_seed: Sequence[dict[str, float]], number: int) -> Interval | None:
        """Of a group less the first; None where a run has failed, or nothing tells what seeds make."""
        first, second = by_seed[0], by_seed[number]
        one, other = list(first.values()), list(second.values())
        if not all(map(math.isfinite, [*one, *other])):
            return None
        if len(one) > 1 and len(other) > 1:
            if first.keys() == second.keys() and len(first) >= _PAIRS:
                return paired([second[seed] - first[seed] for seed in first], self.level)
            return welch(one, other, self.level)
        if self.seed_noise is not None:
            words = f"seed_noise {self.seed_noise:g}, as given"
            return with_spread(one, other, self.seed_noise, math.inf, self.level, words)
        finite = [list(seeds.values()) for seeds in by_seed if all(map(math.isfinite, seeds.values()))]
        if (spread := pooled_spread(finite)) is None:
            return None
        several = [group.letter for group in self.groups if group.n_seeds > 1]
        words = f"the spread of {_and(several)}'s seeds taken for all"
        return with_spread(one, other, *spread, self.level, words)

    def verdict(self, number: int) -> Verdict:
        """What may be said of a group beside the first."""
        row = self.row
        failed = [any(map(self.has_failed, self.groups[one].runs)) for one in (0, number)]
        if any(failed):
            return "not known" if all(failed) else "worse" if failed[1] else "better"
        interval = row.intervals[number]
        if interval is None:
            return "not known"
        if not interval.excludes_zero:
            return "no difference"
        return "better" if interval.difference < 0 else "worse"

    def settings(self) -> dict[str, list[str]]:
        """The settings that differ, by short names, and each group's values as text; no seeds that all groups have."""
        found = {}
        for short, name in differing([run.run for run in self.runs]).items():
            values = [[run.run.settings.get(name) for run in group.runs] for group in self.groups]
            texts = [["-" if one is None else setting_text(one) for one in of_group] for of_group in values]
            if not is_seed(name) or len(texts) == 1 or any(set(one) != set(texts[0]) for one in texts):
                found[short] = [", ".join(dict.fromkeys(of_group)) for of_group in texts]
        return found

    def points_with_sign(self, number: int, difference: float) -> tuple[int, int]:
        """At how many points the first runs of a group and of A differ with this sign, and the number of points."""
        one, other = (self.outcomes[self.groups[each].runs[0].name] for each in (0, number))
        _, a, b = np.intersect1d(one.steps, other.steps, return_indices=True)
        return int((np.sign(other.values[b] - one.values[a]) == np.sign(difference)).sum()), len(a)


def compare_runs(
    runs: list[ComparedRun],
    by: str = "settings",
    at: str | None = None,
    seed_noise: float | None = None,
    named: bool = False,
) -> Comparison:
    """Compare runs.

    Args:
        runs: two or more.
        by: what a group is: `settings`, `folders` as they were named, or `runs`, each one alone.
        at: row on which the verdicts are: an axis, `last` or `best`; see `Comparison`.
        seed_noise: standard deviation over seeds, where no group tells it.
        named: whether the user has named the validation metric.

    Raises:
        UsageError: the runs have no metric in common; the row is not known.
    """
    notes: list[str] = []
    different = differing([run.run for run in runs]).values()
    metrics, is_validation = _metrics(runs, list(different), named, notes)
    found = Comparison(runs, groups_of(runs, by), metrics, is_validation, at, seed_noise)
    found.notes = [*notes, *_notes(found, list(different))]
    return found


def _metrics(
    runs: list[ComparedRun], different: list[str], named: bool, notes: list[str]
) -> tuple[dict[str, str], bool]:
    """The metric of each run, by its name, and whether it is of validations."""
    have = {role: [run for run in runs if len(run.log[role])] for role in OUTCOMES}
    role = next((role for role in OUTCOMES if len(have[role]) == len(runs)), None)
    if role is None:
        first = next(role for role in OUTCOMES if have[role])
        lacks = next(run for run in runs if run not in have[first])
        own = next(role for role in OUTCOMES if len(lacks.log[role]))
        raise UsageError(
            f"compare: {lacks.name} logged {lacks.log.name(own)} and {have[first][0].name} "
            f"{have[first][0].log.name(first)}: no metric in common: name one that all have, --names val_loss=NAME"
        )
    if role != "val_loss":
        without = [run.name for run in runs if run not in have["val_loss"]]
        notes.append(
            f"no validation loss of {_and(without)}: compared are means of the training loss over steps, which are "
            "of other rows than a validation, and of dropout and other noise"
        )
    others = [name for name in different if name.rpartition(".")[2] in _TOKENIZERS]
    if role == "val_loss" and others and not named:
        if all(len(run.log.metrics.get(BITS, ())) for run in runs):
            notes.append(f"{others[0]} differs, so bits per byte are compared: losses are of other tokens")
            return {run.name: BITS for run in runs}, True
        notes.append(f"{others[0]} differs: losses are of other tokens, and do not compare; bits per byte would")
    return {run.name: run.log.name(role) for run in runs}, role == "val_loss"


def _notes(found: Comparison, different: list[str]) -> Iterator[str]:
    """What a reader of the figures must know."""
    if nameless := [run.name for run in found.runs if not run.run.settings]:
        yield f"no settings on file for {_and(nameless)} (config.yaml, hparams.yaml): each is a group alone"
    for group in found.groups:
        if again := len(group.runs) - group.n_seeds:
            yield f"{again} of {group.letter}'s runs repeat{'s' * (again == 1)} a seed: their mean counts as one seed"
        if failed := [run.name for run in group.runs if found.has_failed(run)]:
            yield f"{_and(failed)} of {group.letter}: the loss was not finite at the end"
    for run in found.runs:
        values = run.log.metrics[found.metrics[run.name]].values
        if not found.has_failed(run) and (bad := int((~np.isfinite(values)).sum())):
            yield f"{run.name}: {bad} of {len(values)} values of {found.metrics[run.name]} are not finite, and left out"
    if active := [run.name for run in found.runs if run.run.state == "active"]:
        yield f"{_and(active)}: may be going on still"
    data = [name for name in different if name.startswith("data.") and not _is_of_training(name)]
    data += [name for name in different if name == "trainer.limit_val_batches"]
    if data and found.is_validation:
        yield f"{_and(data)} differ{'s' * (len(data) == 1)}: the validations may be of other rows"
    if (line := _unfinished(found)) is not None:
        yield line
    for axis, need in AXES.items():
        if axis not in found.known:
            lacks = [run.name for run in found.runs if run.amounts[axis] is None]
            who = "the runs" if len(lacks) == len(found.runs) else _and(lacks)
            yield f"{axis_text(axis)}: not known of {who} ({need})"
        elif axis not in found.rows:
            yield f"not compared at equal {axis_text(axis)}: one run ended before another logged its first loss"


def _is_of_training(name: str) -> bool:
    return name in _ROWS_OF_TRAINING or name.endswith(("seed", "num_workers", "cache_dir"))


def _unfinished(found: Comparison) -> str | None:
    """Runs that go on beyond the place of the verdict."""
    row = found.row
    if row.place is None:
        return None
    lines = []
    for group in found.groups:
        shares = []
        for run in group.runs:
            last = found.places(run, row.name)[-1]
            shares.append(row.place / last if last > 0 else 1.0)
        if min(shares) < _FULL:
            lines.append(f"{group.letter} had done {min(shares):.0%} of its run")
    return f"at equal {axis_text(row.name)} {_and(lines)}: its schedule had not ended there" if lines else None


def _and(words: Sequence[str]) -> str:
    """Words as a list, at most four of them."""
    shown = [*words[:4], *([f"{len(words) - 4} more"] if len(words) > 4 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
