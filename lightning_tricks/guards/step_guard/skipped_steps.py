"""The skipped steps of a run, on the host: a line for each, their number, and the reason to stop the run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks._samples import in_words
from lightning_tricks.guards.step_guard.judgement import Judgement
from lightning_tricks.metrics.row import Row

SAME, RETRIED, OUT_AGAIN = 1.0, 2.0, 3.0  # results of a step that was computed again
_RECHECKS = {
    SAME: ", and the same when computed again: it is the data",
    RETRIED: "; computed again it was another, which is used: a hardware fault, or kernels that are not deterministic",
    OUT_AGAIN: "; computed again it was another, and out of bounds too: a hardware fault, or kernels that are not "
    "deterministic",
}
_GO_ON = "go on from them or from a checkpoint with a lower lr, with data.skip_samples, or with a higher limit"
_MANY = 256  # steps that a run without logging keeps before it counts them
_LINES = 5  # an interval, so that a run in trouble does not fill the terminal


class Batch(NamedTuple):
    """Where the batch of a step came from."""

    samples: list[tuple[int, int]] | None  # sample positions, see `step_samples`
    epoch: int
    batch_idx: int

    def __str__(self) -> str:
        if self.samples is None:
            return f"batch {self.batch_idx} of epoch {self.epoch}"
        return f"samples {in_words(self.samples)}"


class Names:
    """Names under which the numbers of one optimizer stand in the buffer, of those that a step has.

    Attributes:
        skipped: whether the step was skipped, 0 or 1.
        recheck: result of a step that was computed again.
        missing: steps until the window is full, while that is not known.
        values, rank: see `Judgement.out_of_bounds`; in runs of several processes.
    """

    def __init__(self, index: int) -> None:
        place = f"_step_guard/{index}/"
        self.skipped, self.recheck = f"{place}skipped", f"{place}recheck"
        self.missing, self.rank = f"{place}missing", f"{place}rank"
        self.values = tuple(place + name for name in ("loss", "norm", "loss_limit", "norm_limit"))


class Judged(NamedTuple):
    """A step of one optimizer, of which the host has not heard yet."""

    optimizer_index: int
    skip: Tensor  # 0-dim, 1.0 or 0.0
    judgement: Judgement  # on this rank
    batch: Batch


class SkippedSteps:
    """Counts the skipped steps on the host, when the interval's values have come there, and says a line for each.

    Args:
        max_in_a_row: skipped steps in a row after which the run shall stop.
        counts: of each optimizer, skipped steps in a row and in all before the first one that is judged.

    Attributes:
        reason_to_stop: why the run shall stop; empty while it shall not.
        full_windows: indices of the optimizers whose window is full on every rank.
        names: of each optimizer.
    """

    def __init__(self, max_in_a_row: int, counts: Sequence[Sequence[float]] = ()) -> None:
        self.max_in_a_row = max_in_a_row
        self.reason_to_stop = ""
        self.full_windows: set[int] = set()
        self.names = [Names(index) for index in range(len(counts))]
        self._in_a_row = [int(in_a_row) for in_a_row, _ in counts]
        self._totals = [int(total) for _, total in counts]
        self._streaks: list[list[Batch]] = [[] for _ in counts]  # of the steps in a row, those of this fit
        self._unheard: dict[int, list[Judged]] = {}  # by step
        self._undone: set[int] = set()  # steps of these that a rollback has undone
        self._too_many: dict[int, str] = {}  # by optimizer: what to say of a streak that is long enough to stop

    def note(self, step: int, judged: Judged) -> None:
        """Keep a step until the host hears how it was judged."""
        self._unheard.setdefault(step, []).append(judged)

    def counts(self) -> list[list[float]]:
        """Of each optimizer, skipped steps in a row and in all, also of those not heard of: reads the device."""
        in_a_row, totals = list(self._in_a_row), list(self._totals)
        for step, several in sorted(self._unheard.items()):
            for judged in several:
                skipped = bool(judged.skip)
                totals[judged.optimizer_index] += skipped
                if step not in self._undone:
                    in_a_row[judged.optimizer_index] = (in_a_row[judged.optimizer_index] + 1) * skipped
        return [[float(own), float(total)] for own, total in zip(in_a_row, totals, strict=True)]

    def count_unheard(self) -> None:
        """Count the steps of a run that logs nothing, once they are many: reads the device."""
        if len(self._unheard) >= _MANY:
            counts = self.counts()
            self._in_a_row, self._totals = [int(own) for own, _ in counts], [int(total) for _, total in counts]
            self._unheard.clear()
            self._undone.clear()

    def after_rollback(self) -> None:
        """Count anew: no step that was made up to now is a reason to stop, also none that the host has not heard of."""
        self.reason_to_stop = ""
        self._in_a_row = [0 for _ in self._in_a_row]
        self._streaks = [[] for _ in self._streaks]
        self._too_many.clear()
        self._undone = set(self._unheard)

    def report(self, rows: list[Row]) -> dict[str, float]:
        """Say a line for each skipped step among `rows`; returns `guard/skipped_steps`."""
        lines, any_judged = [], False
        for row in rows:
            for judged in self._unheard.pop(row.step, ()):
                if (skipped := row.values.get(self.names[judged.optimizer_index].skipped)) is not None:
                    any_judged = True
                    lines += self._lines_of(row, judged, bool(skipped))
        self._undone.clear()
        for line in lines[:_LINES]:
            rank_zero_warn(line)
        if lines[_LINES:]:
            rank_zero_warn(f"StepGuard: {len(lines) - _LINES} more steps were out of bounds up to step {rows[-1].step}")
        return {"guard/skipped_steps": float(sum(self._totals))} if any_judged else {}

    def _lines_of(self, row: Row, judged: Judged, skipped: bool) -> list[str]:
        """The line of one step if it was out of bounds, else none; sets `reason_to_stop` after too many in a row."""
        index, step, names = judged.optimizer_index, row.step, self.names[judged.optimizer_index]
        if row.values.get(names.missing, 1) <= 0:
            self.full_windows.add(index)
        if not skipped:
            self._in_a_row[index] = 0
            self._streaks[index].clear()
            if too_many := self._too_many.pop(index, ""):
                self.reason_to_stop = f"{too_many}. Later steps were accepted, so the weights are newer: {_GO_ON}"
            if names.recheck not in row.values:
                return []
            return [f"StepGuard: step {step}: {_reason(row, names, judged)}; {judged.batch}"]
        self._totals[index] += 1
        reason = _reason(row, names, judged)
        if step not in self._undone:
            self._in_a_row[index] += 1
            self._streaks[index].append(judged.batch)
            if self._in_a_row[index] >= self.max_in_a_row:
                self._stop(index, step, reason)
        return [f"StepGuard: step {step} is skipped: {reason}; {judged.batch}"]

    def _stop(self, index: int, step: int, reason: str) -> None:
        first = step + 1 - self._in_a_row[index]
        self._too_many[index] = skipped = (
            f"StepGuard.max_skipped_steps={self.max_in_a_row}: all steps from {first} to {step} were skipped, the last "
            f"one for its {reason}; {_joined(self._streaks[index])}"
        )
        self.reason_to_stop = f"{skipped}. The weights are those of step {first}: {_GO_ON}"


def _reason(row: Row, names: Names, judged: Judged) -> str:
    """Which values are out of bounds, on which rank, and the same or not when computed again."""
    if names.rank in row.values:
        numbers = [row.values[name] for name in names.values]
    else:
        numbers = judged.judgement.out_of_bounds(0)[1].flatten().tolist()
    loss, norm, *limits = numbers
    parts = []
    for value, limit, label in zip((loss, norm), limits, ("loss", "gradient norm"), strict=True):
        if value == math.inf:
            parts.append(f"{label} not finite")
        elif value > -math.inf:
            parts.append(f"{label} {value:.4g} above {limit:.4g}")
    rank = row.values.get(names.rank, 0)
    where = f" on rank {int(rank) - 1}" if rank > 1 else ""
    return " and ".join(parts) + where + _RECHECKS.get(row.values.get(names.recheck, 0), "")


def _joined(batches: list[Batch]) -> str:
    """Where the batches of consecutive steps came from."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        for first, last in batch.samples or ():
            joins = runs and runs[-1][1] + 1 == first
            runs[-1:] = [(runs[-1][0], last)] if joins else [*runs[-1:], (first, last)]
    return str(Batch(runs, 0, 0)) if runs else f"{batches[0]} to {batches[-1]}"
