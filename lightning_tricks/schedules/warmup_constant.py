"""Warmup, then the peak: for runs without an end, and for the stable part of a warmup-stable-decay run."""

from dataclasses import dataclass

from lightning_tricks.schedules.schedule import Schedule, check_whole, warmup_lr


@dataclass(frozen=True, kw_only=True)
class WarmupConstant(Schedule):
    """Linear warmup to the peak, then the peak. Needs no `max_steps`.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. From step warmup_steps - 1 to the
    last one and past it: the peak. To end such a run with a decay, resume its checkpoint with `WarmupStableDecay` and
    its `decay_start`.

    Args:
        warmup_steps: length of the warmup in optimizer steps; 0 for none.

    Raises:
        UsageError: a setting out of range; a warmup as long as the run, where `max_steps` is known.

    Source: Haegele et al. 2024, https://arxiv.org/abs/2405.18392 (constant rate, then a cooldown from any checkpoint).
    """

    warmup_steps: int

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        self.check(total_steps)
        return warmup_lr(peak, step, self.warmup_steps) if step < self.warmup_steps else peak
