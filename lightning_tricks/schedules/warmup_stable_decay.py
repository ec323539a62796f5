"""Warmup, the peak for most of the run, then a sharp decay (WSD), which can start from any checkpoint at the peak."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

from lightning_tricks._errors import UsageError
from lightning_tricks.schedules.decay_span import check_decay_fits, check_decay_options, decay_start
from lightning_tricks.schedules.schedule import Schedule, check_share, check_whole, floor_lr, warmup_lr

_SHAPES: dict[str, Callable[[float], float]] = {  # from the decay's progress, 0 to 1, to the share that is left of it
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """Linear warmup, the peak, and a decay over the last part of the run to `min_ratio` of the peak.

    Give the decay by its length (`decay_steps`), by its share of the run (`decay_fraction`) or by the step at which it
    starts (`decay_start`); it always ends with the run. To branch a decay off a checkpoint of the stable part, resume
    it with `decay_start` at the checkpoint's step and `max_steps` at the end of the decay: the curve before
    `decay_start` does not depend on `max_steps`.

    First step (0): 1 / warmup_steps of the peak, or the peak itself without warmup. Peak: from step warmup_steps - 1 to
    the decay's first step. Last step (total - 1): above the floor by the value of `decay_shape` one step before its
    end. From step `total` on: the floor.

    Args:
        warmup_steps: length of the warmup in optimizer steps; 0 for none.
        decay_shape: `linear`, `cosine` (half a period) or `1-sqrt`. Default: `1-sqrt`, better than linear in the
            second source.
        decay_steps: length of the decay in optimizer steps.
        decay_fraction: length of the decay as a share of the whole run, rounded to a whole step; 0.1 if none of the
            three is given, because 10 % of the tokens were enough in the first source.
        decay_start: the step at which the decay starts, counted from the start of the run that is branched off.
        min_ratio: the floor as a share of the peak.

    Raises:
        UsageError: a setting out of range; two of the three given; no `max_steps`; a run too short for both parts.

    Source: Hu et al. 2024, https://arxiv.org/abs/2404.06395 (WSD); Haegele et al. 2024,
        https://arxiv.org/abs/2405.18392 (the 1-sqrt shape).
    """

    warmup_steps: int
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    decay_steps: int | None = None
    decay_fraction: float | None = None
    decay_start: int | None = None
    min_ratio: float = 0.0

    needs_total: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")
        check_share(self, "min_ratio")
        if self.decay_shape not in _SHAPES:
            raise UsageError(f"WarmupStableDecay.decay_shape={self.decay_shape!r}: give one of {', '.join(_SHAPES)}")
        check_decay_options(self)

    def check(self, total_steps: int | None) -> None:
        """Refuse, besides what every schedule refuses, a decay that starts in the warmup or never."""
        super().check(total_steps)
        total = cast(int, total_steps)
        check_decay_fits(self, total, self.start_of_decay(total))

    def start_of_decay(self, total: int) -> int:
        """The step at which the decay of a run of `total` steps starts."""
        return decay_start(self, total, default_fraction=0.1)

    def decaying_from(self, step: int) -> "WarmupStableDecay":
        """The same schedule, but with a decay from `step` to the end of the run."""
        return replace(self, decay_start=step, decay_steps=None, decay_fraction=None)

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        total = self._checked(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        start = self.start_of_decay(total)
        if step < start:
            return peak
        floor = floor_lr(peak, self.min_ratio)
        progress = min(1.0, (step - start) / (total - start))
        return floor + _SHAPES[self.decay_shape](progress) * (peak - floor)
