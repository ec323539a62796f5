"""When a checkpoint is due: by steps, by minutes, and at the steps whose checkpoints stay for ever.

Steps are compared with the one before: with several optimizers Lightning's count goes up by more than one at a time, so
that it may jump over a multiple.
"""

import time
from typing import Literal


def passes_multiple(before: int, step: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `step`; never where `every` is None."""
    return every is not None and step // every > before // every


def passes_power_of_two(before: int, step: int) -> bool:
    """Whether 1, 2, 4, 8, ... lies after `before` and not after `step`."""
    return step.bit_length() > before.bit_length()


class SaveClock:
    """Whether a checkpoint is due, and whether it shall stay for ever.

    Args:
        every_n_train_steps: see `SafeCheckpoint`.
        every_n_minutes: likewise.
        permanent_steps: likewise.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_minutes: float | None,
        permanent_steps: int | Literal["powers_of_two"] | None,
    ) -> None:
        self.every_n_train_steps, self.every_n_minutes = every_n_train_steps, every_n_minutes
        self.permanent_steps = permanent_steps
        self.due = self.permanent = False
        self._step, self._saved_at = 0, 0.0

    def start(self, step: int) -> None:
        """Begin to count at a step whose checkpoint, if any, there is already."""
        self._step = step
        self.saved()

    def saved(self) -> None:
        """A checkpoint was saved now, or it was tried."""
        self.due = self.permanent = False
        self._saved_at = time.monotonic()

    def advance(self, step: int) -> bool:
        """Take note of the optimizer steps done so far; returns whether there are more than at the last call."""
        before, self._step = self._step, step
        if self.permanent_steps == "powers_of_two":
            self.permanent |= passes_power_of_two(before, step)
        else:
            self.permanent |= passes_multiple(before, step, self.permanent_steps)
        self.due |= self.permanent or passes_multiple(before, step, self.every_n_train_steps)
        return step != before

    def minutes_are_over(self) -> bool:
        """Whether the interval in minutes has passed on this process's clock."""
        return self.every_n_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_n_minutes
