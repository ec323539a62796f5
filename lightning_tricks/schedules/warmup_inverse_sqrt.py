"""Warmup, then a decay in proportion to 1 / sqrt(step): the original Transformer's curve, which has no end."""

import math
from dataclasses import dataclass

from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr


@dataclass(frozen=True, kw_only=True)
class WarmupInverseSqrt(Schedule):
    """Linear warmup to the peak, then `peak * sqrt(warmup_steps / t)` with t = step + 1; never below `min_ratio`.

    It needs no `max_steps`. Without warmup it is `peak / sqrt(t)`.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Peak: step warmup_steps - 1. Last
    step (total - 1): sqrt(warmup_steps / total) of the peak, or the floor. Past it: further down to the floor.

    Args:
        warmup_steps: length of the warmup in optimizer steps, and the time scale of the decay; 0 for none.
        min_ratio: the floor as a share of the peak.

    Raises:
        UsageError: a setting out of range; a warmup as long as the run, where `max_steps` is known.

    Source: Vaswani et al. 2017, equation 3, https://arxiv.org/abs/1706.03762, divided by its value at the peak.
    """

    warmup_steps: int
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")
        check_share(self, "min_ratio")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        self.check(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        decayed = peak * math.sqrt(max(1, self.warmup_steps) / (step + 1))
        return max(floor_lr(peak, self.min_ratio), decayed)
