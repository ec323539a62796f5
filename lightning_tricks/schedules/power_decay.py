"""Warmup, the peak, then a decay by a power of the steps that are left: the curve of modded-nanogpt's records."""

import math
from dataclasses import dataclass
from typing import ClassVar, cast

from lightning_tricks._errors import UsageError
from lightning_tricks.schedules.decay_span import check_decay_fits, check_decay_options, decay_start
from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr


@dataclass(frozen=True, kw_only=True)
class PowerDecay(Schedule):
    """Linear warmup, then `min(peak, c * (total - step) ** power)`: the peak, and a decay to 0 at the end of the run.

    `c` follows from the step at which the decay starts: `peak / (total - start) ** power`. Give that step by one of
    `decay_steps`, `decay_fraction` and `decay_start`, as for `WarmupStableDecay`, also to branch a decay off a
    checkpoint. A power of 1 is a straight line; above 1 the decay is steep at first and flat at its end.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Peak: from step warmup_steps - 1 to
    the decay's first step. Last step (total - 1): above the floor by (1 / (total - start)) ** power of its distance to
    the peak. From step `total` on: the floor.

    After the warmup `lr` is bit for bit `min(peak, floor + ((total - step) / (total - start)) ** power * (peak -
    floor))` from the decay's first step on, with the floor as a decimal product.

    Args:
        warmup_steps: length of the warmup in optimizer steps; 0 for none, as in the source.
        power: exponent of the steps that are left. Default: the source's.
        decay_steps: length of the decay in optimizer steps.
        decay_fraction: length of the decay as a share of the whole run, rounded to a whole step; 0.8 if none of the
            three is given, because the source's hidden matrices decay over 82 % of the schedule (its other parameters
            over 49 %).
        decay_start: the step at which the decay starts, counted from the start of the run that is branched off.
        min_ratio: the floor as a share of the peak; 0 in the source, which stops its run at 93 % of the schedule, where
            the rate of the hidden matrices is a twentieth of their peak.

    Raises:
        UsageError: a setting out of range; two of the three given; no length of the run; a run too short for both
            parts.

    Source: PowerCool, record 46 of modded-nanogpt's optimization benchmark,
        https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_3_optimization (README, "Active
        techniques", and `_lr` in results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py); first in record 20.
    """

    warmup_steps: int
    power: float = 1.2
    decay_steps: int | None = None
    decay_fraction: float | None = None
    decay_start: int | None = None
    min_ratio: float = 0.0

    needs_total: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")
        check_share(self, "min_ratio")
        check_decay_options(self)
        power = self.power
        if isinstance(power, bool) or not isinstance(power, int | float) or not 0 < power < math.inf:
            raise UsageError(f"PowerDecay.power={power!r}: give a number above 0; 1 is a straight line")

    def check(self, total_steps: int | None) -> None:
        """Refuse, besides what every schedule refuses, a decay that starts in the warmup or never."""
        super().check(total_steps)
        total = cast(int, total_steps)
        check_decay_fits(self, total, self._start(total))

    def _start(self, total: int) -> int:
        return decay_start(self, total, default_fraction=0.8)

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        total = self._checked(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        start = self._start(total)
        if step < start:
            return peak
        floor = floor_lr(peak, self.min_ratio)
        left = max(0, total - step) / (total - start)
        return min(peak, floor + left**self.power * (peak - floor))
