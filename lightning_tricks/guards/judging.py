"""How StepGuard judges steps: the verdict on the device, and the report on the host."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce

from lightning_tricks._trainer.lightning import rank_zero_warn
from lightning_tricks._trainer.run_facts import samples_in_words
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import Part

_GO_ON = "resume from an older checkpoint or start anew, with a lower lr, data.skip_samples or a higher limit"
_MANY = 256  # steps that a run without logging keeps before it counts them


class Judgement:
    """The loss and the gradient norm of one step, and which of them are within bounds.

    Args:
        parts: of this rank's micro-batches, sum and count of their losses, see `StepLoss`. Where nothing counts on any
            rank, the loss is 0.
        norm: of all gradients before the clip, a 0-dim tensor on any device.
        limits: (2,) largest loss and largest norm, both finite: NaN and infinity are within none.
        several: whether there are other ranks, whose parts count as well: every rank must call. No wait.
        overflows: whether a norm that is not finite is an overflow of fp16, which a scaler or DeepSpeed skips itself.

    Attributes:
        values: (2,) loss and norm, of the limits' dtype.
        within: (2,) bool, of each.
        good: 0-dim bool, whether both are.
        counted: 0-dim bool, whether anything counts in the loss.
        finite: 0-dim bool, whether the norm is, where one that is not does not make the step bad; else None.
    """

    def __init__(self, parts: Sequence[Part], norm: Tensor, limits: Tensor, several: bool, overflows: bool) -> None:
        computed = torch.stack([_like(limits, number) for number in (norm, *chain(*parts))])
        own = computed[1:].view(-1, 2).sum(0) if len(parts) != 1 else computed[1:]
        sums = own
        if several:
            sums = own.clone()
            all_reduce(sums)
        self.counted = sums[1] > 0
        self.values, self.limits = torch.stack([_mean(sums), computed[0]]), limits
        self.within = self.values <= limits
        self._own_is_within = _mean(own) <= limits[0] if several else self.within[0]
        self.finite = self.values[1].isfinite() if overflows else None
        if self.finite is not None:
            self.within[1] |= ~self.finite & self.within[0]
        self.good = self.within.all()

    def out_of_bounds(self, rank: int) -> tuple[Tensor, Tensor]:
        """For the report, where the largest value over all ranks shows what was out of bounds on any of them.

        Returns:
            rank + 1, 0-dim, or 0 if the mean of this rank's own losses is within bounds; (2, 2) values and limits, of
            which those within bounds are -inf, and values that are not finite are inf.
        """
        values = self.values.nan_to_num(math.inf, math.inf, math.inf)
        out = torch.where(self.within, -math.inf, torch.stack([values, self.limits]))
        return torch.where(self.good | self._own_is_within, 0.0, rank + 1.0), out


def _like(limits: Tensor, number: Tensor) -> Tensor:
    # asked first, because `to` takes time also where it changes nothing
    same = number.dtype == limits.dtype and number.device == limits.device
    return number if same else number.to(limits.device, limits.dtype)


def _mean(sums: Tensor) -> Tensor:
    return sums[0] / sums[1].clamp(min=torch.finfo(sums.dtype).tiny)  # 0 / 0 is 0


def any_rank(flag: Tensor, several: bool) -> Tensor:
    """1.0 if `flag`, a 0-dim bool tensor, holds on any of `several` ranks, else 0.0; every rank must call. No wait."""
    number = flag.float()
    if several:
        all_reduce(number, ReduceOp.MAX)
    return number


class Batch(NamedTuple):
    """Where the batch of a step came from."""

    samples: list[tuple[int, int]] | None  # sample positions, see `step_samples`
    epoch: int
    batch_idx: int

    def __str__(self) -> str:
        if self.samples is None:
            return f"batch {self.batch_idx} of epoch {self.epoch}"
        return f"samples {samples_in_words(self.samples)}"


class JudgementKeys:
    """The keys under which the numbers of a step stand in the buffer, of those that it has.

    Args:
        index: of the optimizer.
        number: of the step among those that this optimizer makes in one batch, from 0.

    Attributes:
        skipped: whether the step was skipped, 0 or 1.
        values, rank: see `Judgement.out_of_bounds`; in runs of several processes.
    """

    def __init__(self, index: int, number: int) -> None:
        place = f"_step_guard/{index}.{number}/"
        self.skipped, self.rank = f"{place}skipped", f"{place}rank"
        self.values = tuple(place + name for name in ("loss", "norm", "loss_limit", "norm_limit"))


class PendingStep(NamedTuple):
    """A step of one optimizer, of which the host has not heard yet."""

    optimizer_index: int
    skip: Tensor  # 0-dim, 1.0 or 0.0
    judgement: Judgement  # on this rank
    batch: Batch
    keys: JudgementKeys


class SkippedSteps:
    """Counts the skipped steps on the host, when the interval's values have come there, and says a line for each.

    Args:
        max_in_a_row: skipped steps in a row after which the run shall stop.
        counts: of each optimizer, skipped steps in a row and in all before the first one that is judged.

    Attributes:
        reason_to_stop: why the run shall stop; empty while it shall not.
    """

    def __init__(self, max_in_a_row: int, counts: Sequence[Sequence[float]] = ()) -> None:
        self.max_in_a_row = max_in_a_row
        self.reason_to_stop = ""
        self._in_a_row = [int(in_a_row) for in_a_row, _ in counts]
        self._totals = [int(total) for _, total in counts]
        self._streaks: list[list[tuple[int, Batch]]] = [[] for _ in counts]  # of the steps in a row, those of this fit
        self._unheard: dict[int, list[PendingStep]] = {}  # by step
        self._too_many: dict[int, str] = {}  # by optimizer: what to say of a streak that is long enough to stop

    def note(self, step: int, index: int, skip: Tensor, judgement: Judgement, batch: Batch) -> JudgementKeys:
        """Keep a step until the host hears how it was judged; returns the keys of its numbers."""
        noted = self._unheard.setdefault(step, [])
        keys = JudgementKeys(index, sum(other.optimizer_index == index for other in noted))
        noted.append(PendingStep(index, skip, judgement, batch, keys))
        return keys

    def counts(self) -> list[list[float]]:
        """Of each optimizer, skipped steps in a row and in all, also of those not heard of: reads the device."""
        in_a_row, totals = list(self._in_a_row), list(self._totals)
        for _, several in sorted(self._unheard.items()):
            for pending in several:
                skipped = bool(pending.skip)
                totals[pending.optimizer_index] += skipped
                in_a_row[pending.optimizer_index] = (in_a_row[pending.optimizer_index] + 1) * skipped
        return [[float(own), float(total)] for own, total in zip(in_a_row, totals, strict=True)]

    def count_unheard(self) -> None:
        """Count the steps of a run that logs nothing, once they are many: reads the device."""
        if len(self._unheard) >= _MANY:
            counts = self.counts()
            self._in_a_row, self._totals = [int(own) for own, _ in counts], [int(total) for _, total in counts]
            self._unheard.clear()

    def after_rollback(self) -> None:
        """Count anew: no step that was made up to now is a reason to stop; the host has heard of all of them."""
        self.reason_to_stop = ""
        self._in_a_row = [0 for _ in self._in_a_row]
        self._streaks = [[] for _ in self._streaks]
        self._too_many.clear()

    def report(self, rows: list[Row]) -> dict[str, float]:
        """Say which step among `rows` was skipped first, and how many after it; returns `guard/skipped_steps`."""
        skips, any_judged = [], False
        for row in rows:
            for pending in self._unheard.pop(row.step, ()):
                if (skipped := row.values.get(pending.keys.skipped)) is not None:
                    any_judged = True
                    if line := self._line_of(row, pending, bool(skipped)):
                        skips.append((line, pending.batch))
        if skips:
            rank_zero_warn(skips[0][0])
        if more := [batch for _, batch in skips[1:]]:
            steps = "1 more step" if len(more) == 1 else f"{len(more)} more steps"
            where = f"; {_joined(more)}" if more[0].samples else ""
            rank_zero_warn(f"StepGuard: {steps} skipped up to step {rows[-1].step}{where}")
        return {"guard/skipped_steps": float(sum(self._totals))} if any_judged else {}

    def _line_of(self, row: Row, pending: PendingStep, skipped: bool) -> str:
        """The line of one step if it was out of bounds, else ""; sets `reason_to_stop` after too many in a row."""
        index, step = pending.optimizer_index, row.step
        if not skipped:
            self._in_a_row[index] = 0
            self._streaks[index].clear()
            if too_many := self._too_many.pop(index, ""):
                self.reason_to_stop = f"{too_many}. Later steps were accepted, so the weights are newer: {_GO_ON}"
            return ""
        self._totals[index] += 1
        self._in_a_row[index] += 1
        self._streaks[index].append((step, pending.batch))
        reason = _reason(row, pending)
        if self._in_a_row[index] >= self.max_in_a_row:
            self._stop(index, step, reason)
        return f"StepGuard: step {step} is skipped: {reason}; {pending.batch}"

    def _stop(self, index: int, step: int, reason: str) -> None:
        streak = self._streaks[index]
        first = streak[0][0] - (self._in_a_row[index] - len(streak))  # the others were skipped before a resume
        self._too_many[index] = skipped = (
            f"StepGuard.max_skipped_steps={self.max_in_a_row}: all steps from {first} to {step} were skipped, the last "
            f"one for its {reason}; {_joined([batch for _, batch in streak])}"
        )
        self.reason_to_stop = f"{skipped}. The weights are those of step {first}: {_GO_ON}"


def _reason(row: Row, pending: PendingStep) -> str:
    """Which values are out of bounds, and on which rank."""
    keys = pending.keys
    if keys.rank in row.values:
        numbers = [row.values[name] for name in keys.values]
    else:
        numbers = pending.judgement.out_of_bounds(0)[1].flatten().tolist()
    loss, norm, *limits = numbers
    parts = []
    for value, limit, label in zip((loss, norm), limits, ("loss", "gradient norm"), strict=True):
        if value == math.inf:
            parts.append(f"{label} not finite")
        elif value > -math.inf:
            parts.append(f"{label} {value:.4g} above {limit:.4g}")
    rank = row.values.get(keys.rank, 0)
    where = f" on rank {int(rank) - 1}" if rank > 1 else ""
    return " and ".join(parts) + where


def _joined(batches: list[Batch]) -> str:
    """Where the batches of consecutive steps came from."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        for first, last in batch.samples or ():
            joins = runs and runs[-1][1] + 1 == first
            runs[-1:] = [(runs[-1][0], last)] if joins else [*runs[-1:], (first, last)]
    return str(Batch(runs, 0, 0)) if runs else f"{batches[0]} to {batches[-1]}"
