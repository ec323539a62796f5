"""Warmup, then a straight line down to the end of the run."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr


@dataclass(frozen=True, kw_only=True)
class WarmupLinear(Schedule):
    """Linear warmup to the peak, then a straight line down to `min_ratio` of it at the end of the run.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Peak: steps warmup_steps - 1 and
    warmup_steps. Last step (total - 1): above the floor by (1 - min_ratio) / (total - warmup_steps) of the peak, so
    even with min_ratio 0 no step of the run is wasted on a learning rate of 0. From step `total` on: the floor.

    Args:
        warmup_steps: length of the warmup in optimizer steps; 0 for none. Usual: 0.1 to 2 % of the run.
        min_ratio: the floor as a share of the peak. Default: 0, the best of the floors tried by the second source.

    Raises:
        UsageError: a setting out of range; no `max_steps`; a warmup as long as the run.

    Source: `get_linear_schedule_with_warmup` in transformers' optimization.py,
        https://github.com/huggingface/transformers/blob/main/src/transformers/optimization.py; Bergsma et al. 2025,
        https://arxiv.org/abs/2502.15938 (linear to zero against cosine to 10 %).
    """

    warmup_steps: int
    min_ratio: float = 0.0

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
        left = max(0, total - step) / (total - self.warmup_steps)
        return floor + left * (peak - floor)
