"""Warmup, then half a cosine down to a share of the peak: the usual curve for a run of known length."""

import math
from dataclasses import dataclass
from typing import ClassVar

from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(Schedule):
    """Linear warmup to the peak, then half a cosine down to `min_ratio` of it at the end of the run.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Peak: steps warmup_steps - 1 and
    warmup_steps. Last step (total - 1): above the floor by (1 - min_ratio) * (1 - cos(pi / (total - warmup))) / 2 of
    the peak. From step `total` on: the floor.

    `lr` is bit for bit `floor + 0.5 * (1 + cos(pi * (step - warmup) / (total - warmup))) * (peak - floor)`, with the
    floor as a decimal product (0.1 of 6e-4 is 6e-05).

    Args:
        warmup_steps: length of the warmup in optimizer steps; 0 for none. Usual: 0.1 to 2 % of the run.
        min_ratio: the floor as a share of the peak. Default: Llama's 10 %.

    Raises:
        UsageError: a setting out of range; no `max_steps`; a warmup as long as the run.

    Source: Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983 (the cosine); Touvron et al. 2023,
        https://arxiv.org/abs/2302.13971 (10 % of the peak, 2000 steps of warmup).
    """

    warmup_steps: int
    min_ratio: float = 0.1

    needs_total: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")
        check_share(self, "min_ratio")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        total = self._checked(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        floor = floor_lr(peak, self.min_ratio)
        if step >= total:
            return floor
        angle = math.pi * (step - self.warmup_steps) / (total - self.warmup_steps)
        return floor + 0.5 * (1 + math.cos(angle)) * (peak - floor)
