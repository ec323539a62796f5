"""Warmup, then cosine decays one after the other, each from the peak (SGDR): each ends with a usable checkpoint."""

import math
from dataclasses import dataclass

from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr


@dataclass(frozen=True, kw_only=True)
class CosineRestarts(Schedule):
    """Linear warmup, then cosine decays to `min_ratio` of the peak; the first takes `cycle_steps`, the n-th
    `cycle_steps * cycle_mult ** (n - 1)`. Needs no `max_steps`.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Each cycle starts at the peak, and
    its last step is slightly above the floor. Last step of the run: anywhere in a cycle; past it, the cycles go on. To
    end near the floor, let `max_steps` be the warmup and whole cycles.

    Args:
        cycle_steps: length of the first cycle in optimizer steps (T_0 in the source).
        cycle_mult: each cycle's length over that of the one before it (T_mult in the source).
        warmup_steps: length of the warmup before the first cycle, in optimizer steps; 0 for none, as in the source.
        min_ratio: the floor as a share of the peak.

    Raises:
        UsageError: a setting out of range; a warmup as long as the run, where `max_steps` is known.

    Source: Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983.
    """

    cycle_steps: int
    cycle_mult: int = 1
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, "cycle_steps", least=1)
        check_whole(self, "cycle_mult", least=1)
        check_whole(self, "warmup_steps")
        check_share(self, "min_ratio")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        self.check(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        done, length = step - self.warmup_steps, self.cycle_steps
        if self.cycle_mult == 1:
            done %= length
        while done >= length:
            done, length = done - length, length * self.cycle_mult
        floor = floor_lr(peak, self.min_ratio)
        return floor + 0.5 * (1 + math.cos(math.pi * done / length)) * (peak - floor)
