"""The base class of schedules, and the functions that all curves share.

The learning rate is a pure function of the step, so a resume needs the step alone. Subclass `Schedule` to add a curve;
`ScheduleLR` (schedule_lr.py) drives an optimizer with one.
"""

from abc import ABC, abstractmethod
from decimal import Decimal
from typing import ClassVar, cast

from lightning_tricks._core.errors import UsageError

__all__ = ["Schedule"]


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
                    f"{name} needs the length of the run: set trainer.max_steps (now {total_steps}), "
                    "trainer.max_epochs or total_tokens"
                )
            return
        warmup_steps = getattr(self, "warmup_steps", 0)
        if warmup_steps >= total_steps:
            raise UsageError(
                f"{name}.warmup_steps={warmup_steps} is not below trainer.max_steps={total_steps}: "
                "shorten the warmup or lengthen the run"
            )

    def _checked(self, total_steps: int | None) -> int:
        self.check(total_steps)
        return cast(int, total_steps)  # for curves with needs_total: check has refused None


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
