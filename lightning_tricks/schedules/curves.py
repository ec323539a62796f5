"""The curves of the learning rate: their base class, and each curve: a linear warmup, the peak, and its own way down.

The learning rate is a pure function of the step, so a resume needs the step alone. Subclass `Schedule` to add a curve;
`ScheduleLR` (schedule_lr.py) drives an optimizer with one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal, cast

from lightning_tricks._core.errors import UsageError, check_choice

__all__ = [
    "CosineRestarts",
    "PowerDecay",
    "Schedule",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupStableDecay",
]

Shape = Literal["linear", "cosine", "1-sqrt", "power"]


class Schedule(ABC):
    """A learning-rate curve without memory. Subclasses are frozen dataclasses that define `lr`.

    Steps count optimizer updates from 0: a run of `total_steps` uses steps 0 to total_steps - 1. They may be asked for
    in any order.
    """

    needs_total: ClassVar[bool] = False
    """Whether the curve's shape depends on the length of the run."""

    after_warmup: ClassVar[str] = "schedule"
    """The name of the part behind the warmup, in `phases`."""

    @abstractmethod
    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """The learning rate at `step`, for a group whose own learning rate is `peak`.

        This is `peak * factor(step, total_steps)` up to rounding. The curve is computed between `peak` and its floor,
        as the field's formulas are written, because a rounded factor times the peak can be another float.

        Args:
            peak: the group's own learning rate, from the recipe.
            step: optimizer updates done before this one, 0 or more.
            total_steps: optimizer updates in the whole run (`trainer.max_steps`); None or -1 for unknown.
        """

    def factor(self, step: int, total_steps: int | None) -> float:
        """The multiplier of each group's own learning rate at `step`: from 0 to 1, equal to `lr(1.0, ...)`."""
        return self.lr(1.0, step, total_steps)

    def phases(self, total_steps: int | None) -> list[tuple[str, int]]:
        """The parts of the curve, each with its name and first step, for a run that `check` accepts.

        A subclass without a `warmup_steps` has one part, from step 0 to the end.
        """
        warmup_steps: int = getattr(self, "warmup_steps", 0)
        return [*([("warmup", 0)] if warmup_steps else []), (self.after_warmup, warmup_steps)]

    def check(self, total_steps: int | None) -> None:
        """Refuse a run that this curve does not fit, so that it fails before training.

        Raises:
            UsageError: the length is unknown and the curve depends on it, or the warmup never ends.
        """
        name = type(self).__name__
        if total_steps is None or total_steps == -1:
            if self.needs_total:
                raise UsageError(
                    f"{name} needs the length of the run, which loaders without a length and manual optimization do "
                    f"not tell: set trainer.max_steps (now {total_steps}), trainer.max_epochs or total_tokens"
                )
            return
        warmup_steps = getattr(self, "warmup_steps", 0)
        if warmup_steps >= total_steps:
            raise UsageError(
                f"{name}.warmup_steps={warmup_steps} is not below trainer.max_steps={total_steps}: "
                "shorten the warmup or lengthen the run"
            )


def check_whole(schedule: Schedule, option: str, least: int = 0) -> None:
    """Refuse an option that is not a whole number of at least `least`: a float, a bool, NaN."""
    value = getattr(schedule, option)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{type(schedule).__name__}.{option}={value!r}: give a whole number, {least} or more")


def check_share(schedule: Schedule, option: str) -> None:
    """Refuse an option that is not a number from 0 to 1."""
    value = getattr(schedule, option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"{type(schedule).__name__}.{option}={value!r}: give a number between 0 and 1")


def warmup_lr(peak: float, step: int, warmup_steps: int) -> float:
    """Linear warmup: peak / warmup_steps at step 0, the peak at step warmup_steps - 1, never 0.

    Source: `get_lr` in https://github.com/karpathy/build-nanogpt/blob/master/train_gpt2.py.
    """
    return peak * (step + 1) / warmup_steps


def floor_lr(peak: float, min_ratio: float) -> float:
    """The share `min_ratio` of `peak`, multiplied as decimals: 0.1 of 6e-4 is the float 6e-05.

    The binary product 6e-4 * 0.1 is 5.9999999999999995e-05, which is not what a recipe's author means.
    """
    return float(Decimal(repr(float(peak))) * Decimal(repr(float(min_ratio))))


def share_left(shape: Shape, done: int, length: int, power: float = 1.0) -> float:
    """The share of a decay's height that is left when `done` of its `length` steps are done: from 1 to 0.

    Args:
        shape: `linear`; `cosine`, half a period; `1-sqrt`, steep at first; `power`, of the steps that are left.
        done: 0 to length.
        length: at least 1.
        power: exponent of `power`.
    """
    if shape == "linear":
        return (length - done) / length
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done / length))
    if shape == "1-sqrt":
        return 1 - math.sqrt(done / length)
    return float(((length - done) / length) ** power)


class _WithWarmup(Schedule):
    """Base of the curves that follow: a linear warmup, then their own `_after_warmup`."""

    warmup_steps: int

    def __post_init__(self) -> None:
        check_whole(self, "warmup_steps")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        self.check(total_steps)
        if step < self.warmup_steps:
            return warmup_lr(peak, step, self.warmup_steps)
        return self._after_warmup(peak, step, total_steps)

    @abstractmethod
    def _after_warmup(self, peak: float, step: int, total_steps: int | None) -> float:
        """The learning rate from step `warmup_steps` on."""


@dataclass(frozen=True, kw_only=True)
class WarmupConstant(_WithWarmup):
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

    after_warmup: ClassVar[str] = "stable"

    warmup_steps: int

    def _after_warmup(self, peak: float, step: int, total_steps: int | None) -> float:
        return peak


@dataclass(frozen=True, kw_only=True)
class WarmupInverseSqrt(_WithWarmup):
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

    after_warmup: ClassVar[str] = "decay"

    warmup_steps: int
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "min_ratio")

    def _after_warmup(self, peak: float, step: int, total_steps: int | None) -> float:
        decayed = peak * math.sqrt(max(1, self.warmup_steps) / (step + 1))
        return max(floor_lr(peak, self.min_ratio), decayed)


@dataclass(frozen=True, kw_only=True)
class CosineRestarts(_WithWarmup):
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

    after_warmup: ClassVar[str] = "cycles"

    cycle_steps: int
    cycle_mult: int = 1
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, "cycle_steps", least=1)
        check_whole(self, "cycle_mult", least=1)
        super().__post_init__()
        check_share(self, "min_ratio")

    def _after_warmup(self, peak: float, step: int, total_steps: int | None) -> float:
        done, length = step - self.warmup_steps, self.cycle_steps
        if self.cycle_mult == 1:
            done %= length
        while done >= length:
            done, length = done - length, length * self.cycle_mult
        floor = floor_lr(peak, self.min_ratio)
        return floor + share_left("cosine", done, length) * (peak - floor)


class _DecaysToTheEnd(_WithWarmup):
    """Base of the curves whose decay ends with the run, at `min_ratio` of the peak."""

    needs_total: ClassVar[bool] = True
    after_warmup: ClassVar[str] = "stable"

    min_ratio: float
    decay_shape: Shape
    power: float = 1.0  # of a decay_shape "power"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "min_ratio")

    def start_of_decay(self, total: int) -> int:
        """The step at which the decay of a run of `total` steps starts."""
        return self.warmup_steps

    def phases(self, total_steps: int | None) -> list[tuple[str, int]]:
        """Warmup, stable part and decay, without those that have no step."""
        self.check(total_steps)
        start = self.start_of_decay(cast(int, total_steps))
        return [part for part in super().phases(total_steps) if part[1] < start] + [("decay", start)]

    def _after_warmup(self, peak: float, step: int, total_steps: int | None) -> float:
        total = cast(int, total_steps)  # `check` has refused None
        start = self.start_of_decay(total)
        if step < start:
            return peak
        floor, length = floor_lr(peak, self.min_ratio), total - start
        return floor + share_left(self.decay_shape, min(step - start, length), length, self.power) * (peak - floor)


@dataclass(frozen=True, kw_only=True)
class WarmupLinear(_DecaysToTheEnd):
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

    decay_shape = "linear"


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(_DecaysToTheEnd):
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

    decay_shape = "cosine"


class _DecaysAfterThePeak(_DecaysToTheEnd):
    """Base of the curves that stay at the peak, until a decay whose start one of three options gives."""

    default_decay_fraction: ClassVar[float]  # of the run, if none of the three is given

    decay_steps: int | None
    decay_fraction: float | None
    decay_start: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        given = [o for o in ("decay_steps", "decay_fraction", "decay_start") if getattr(self, o) is not None]
        if len(given) > 1:
            raise UsageError(f"{name}: {' and '.join(given)} are both given: keep one of them")
        for option in given:
            if option == "decay_fraction":
                check_share(self, option)
            else:
                check_whole(self, option, least=1 if option == "decay_steps" else 0)

    def start_of_decay(self, total: int) -> int:
        """The step at which the decay of a run of `total` steps starts."""
        if self.decay_start is not None:
            return self.decay_start
        if self.decay_steps is not None:
            return total - self.decay_steps
        fraction = self.default_decay_fraction if self.decay_fraction is None else self.decay_fraction
        return total - round(fraction * total)

    def check(self, total_steps: int | None) -> None:
        """Refuse, besides what every schedule refuses, a decay that starts in the warmup or never."""
        super().check(total_steps)
        name, total = type(self).__name__, cast(int, total_steps)
        start = self.start_of_decay(total)
        if start < self.warmup_steps:
            raise UsageError(
                f"{name}: the decay starts at step {start}, before warmup_steps={self.warmup_steps} is over "
                f"(trainer.max_steps={total}): shorten the warmup or the decay"
            )
        if start >= total:
            raise UsageError(
                f"{name}: the decay starts at step {start}, not before trainer.max_steps={total}: "
                "let it start earlier or lengthen the run"
            )


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(_DecaysAfterThePeak):
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

    default_decay_fraction: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("WarmupStableDecay.decay_shape", self.decay_shape, Literal["linear", "cosine", "1-sqrt"])


@dataclass(frozen=True, kw_only=True)
class PowerDecay(_DecaysAfterThePeak):
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

    decay_shape = "power"
    default_decay_fraction: ClassVar[float] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        power: Any = self.power
        if isinstance(power, bool) or not isinstance(power, int | float) or not 0 < power < math.inf:
            raise UsageError(f"PowerDecay.power={power!r}: give a number above 0; 1 is a straight line")

    def lr(self, peak: float, step: int, total_steps: int | None) -> float:
        """Learning rate at `step`; see the class."""
        return min(peak, super().lr(peak, step, total_steps))
