"""The skipped steps of a run, on the host: a line for each, their number, and the reason to stop the run."""

import math
from typing import NamedTuple

from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks._samples import in_words
from lightning_tricks.metrics.row import Row

SAME, RETRIED, OUT_AGAIN = 1.0, 2.0, 3.0  # results of a step that was computed again
_NUMBERS = ("skipped", "recheck", "in_a_row", "total", "missing", "rank", "loss", "norm", "loss_limit", "norm_limit")
_RECHECKS = {
    SAME: ", and the same when computed again: it is the data",
    RETRIED: "; computed again it was another, which is used: a hardware fault, or kernels that are not deterministic",
    OUT_AGAIN: "; computed again it was another, and out of bounds too: a hardware fault, or kernels that are not "
    "deterministic",
}
_GO_ON = "go on from them or from a checkpoint with a lower lr, with data.skip_samples, or with a higher limit"
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


class SkippedSteps:
    """Reads what StepGuard recorded, when the interval's values have come to the host.

    Args:
        max_in_a_row: skipped steps in a row after which the run shall stop.

    Attributes:
        reason_to_stop: why the run shall stop; empty while it shall not.
        full_windows: indices of the optimizers whose window is full on every rank.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self.max_in_a_row = max_in_a_row
        self.reason_to_stop = ""
        self.full_windows: set[int] = set()
        self._batches: dict[int, Batch] = {}  # by step, of the steps that the host has not heard of
        self._undone: set[int] = set()  # steps of these that a rollback has undone
        self._in_a_row: dict[int, list[Batch]] = {}  # by index of the optimizer
        self._too_many: dict[int, str] = {}  # likewise: what to say of a streak that is long enough to stop

    @staticmethod
    def names(index: int) -> tuple[str, ...]:
        """Names under which an optimizer's numbers stand in the buffer."""
        return tuple(f"_step_guard/{index}/{name}" for name in _NUMBERS)

    def note_batch(self, step: int, batch: Batch) -> None:
        """Keep where the batch of a step came from, until the host hears how the step was judged."""
        self._batches[step] = batch

    def after_rollback(self) -> None:
        """Count anew: no step that was made up to now is a reason to stop, also none that the host has not heard of."""
        self.reason_to_stop = ""
        self._in_a_row.clear()
        self._too_many.clear()
        self._undone = set(self._batches)

    def report(self, rows: list[Row]) -> dict[str, float]:
        """Say a line for each skipped step among `rows`; returns `guard/skipped_steps`."""
        lines = []
        totals: dict[str, float] = {}
        for row in rows:
            batch = self._batches.pop(row.step, None)
            for index in {int(name.split("/")[1]) for name in row.values if name.startswith("_step_guard/")}:
                found = dict(zip(_NUMBERS, (row.values[name] for name in self.names(index)), strict=True))
                totals[str(index)] = found["total"]
                if found["missing"] <= 0:
                    self.full_windows.add(index)
                lines += self._lines_of(row.step, index, found, batch or Batch(None, 0, 0))
        self._undone.clear()
        for line in lines[:_LINES]:
            rank_zero_warn(line)
        if lines[_LINES:]:
            rank_zero_warn(f"StepGuard: {len(lines) - _LINES} more steps were out of bounds up to step {rows[-1].step}")
        return {"guard/skipped_steps": sum(totals.values())} if totals else {}

    def _lines_of(self, step: int, index: int, found: dict[str, float], batch: Batch) -> list[str]:
        """The line of one step if it was out of bounds, else none; sets `reason_to_stop` after too many in a row."""
        streak = self._in_a_row.setdefault(index, [])
        if not found["skipped"]:
            streak.clear()
            if skipped := self._too_many.pop(index, ""):
                self.reason_to_stop = f"{skipped}. Later steps were accepted, so the weights are newer: {_GO_ON}"
            return [f"StepGuard: step {step}: {_reason(found)}; {batch}"] if found["recheck"] else []
        if step not in self._undone:
            streak.append(batch)
        if streak and found["in_a_row"] >= self.max_in_a_row:
            first = step + 1 - int(found["in_a_row"])
            self._too_many[index] = skipped = (
                f"StepGuard.max_skipped_steps={self.max_in_a_row}: all steps from {first} to {step} were skipped, the "
                f"last one for its {_reason(found)}; {_joined(streak)}"
            )
            self.reason_to_stop = f"{skipped}. The weights are those of step {first}: {_GO_ON}"
        return [f"StepGuard: step {step} is skipped: {_reason(found)}; {batch}"]


def _reason(found: dict[str, float]) -> str:
    """Which values are out of bounds, on which rank, and the same or not when computed again."""
    parts = []
    for name, label in (("loss", "loss"), ("norm", "gradient norm")):
        if found[name] == math.inf:
            parts.append(f"{label} not finite")
        elif found[name] > -math.inf:
            parts.append(f"{label} {found[name]:.4g} above {found[f'{name}_limit']:.4g}")
    rank = f" on rank {int(found['rank']) - 1}" if found["rank"] > 1 else ""
    return " and ".join(parts) + rank + _RECHECKS.get(found["recheck"], "")


def _joined(batches: list[Batch]) -> str:
    """Where the batches of consecutive steps came from."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        for first, last in batch.samples or ():
            joins = runs and runs[-1][1] + 1 == first
            runs[-1:] = [(runs[-1][0], last)] if joins else [*runs[-1:], (first, last)]
    return str(Batch(runs, 0, 0)) if runs else f"{batches[0]} to {batches[-1]}"
