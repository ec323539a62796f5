"""Keep the mean of the weights over the last steps, and validate with it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_tricks._errors import UsageError
from lightning_tricks.guards.averages.weight_average import WeightAverage

_LAST, _RUNNING = "last_window", "running_window"


def window_position(step: int, max_steps: int) -> int:
    """The step on a scale where windows begin at multiples of their length, and the last one ends with the run.

    Args:
        step: number of optimizer steps done.
        max_steps: the run's last step; -1 or 0 where it has none, then windows are counted from step 0.
    """
    return step - max_steps if max_steps > 0 else step


class TailAverage(WeightAverage):
    """Keeps the mean of the weights over the last steps, and has validation, test and predict use it; training itself
    stays as it is to the bit.

    The steps are divided into windows of `horizon_steps`, the last of which ends with `max_steps`. At the end of a
    window the average is the mean over all of its steps. Within a window it moves from the mean of the window before to
    the mean of the running one, in proportion to the steps done, so that it never jumps and never stands still; before
    the end of the first window it is the mean since the start. Memory is that of two averages, whatever the horizon.

    Everything else is as in `EMA`: shards, fp32, exchange in place, checkpoints, `val/tail_average_share`. Its name in
    `generate --average` is `tail_average`.

    Args:
        horizon_steps: optimizer steps of a window, as `trainer.global_step` counts them; 500 is that of the source. For
            long runs about one percent of the steps.
        every_n_steps: steps between two weights that are taken in; a divisor of `horizon_steps`.
        blend: share of the average in what takes the weights' place; the rest is the weights. 1: the average alone.
        validate: whether validation, test and predict use the average; if not, it is kept and saved only.

    Raises:
        UsageError: an option out of range; otherwise see `EMA`.

    Source: `WeightAverager` of https://github.com/epfml/schedules-and-scaling, for Haegele et al. 2024,
        https://arxiv.org/abs/2405.18392 (windows of 500 steps); Sanyal et al. 2023, https://arxiv.org/abs/2306.03241.
    """

    NAME: ClassVar[str] = "tail_average"

    def __init__(
        self, horizon_steps: int = 500, every_n_steps: int = 1, blend: float = 1.0, validate: bool = True
    ) -> None:
        if horizon_steps < 1:
            raise UsageError(f"TailAverage: horizon_steps={horizon_steps}: give at least 1")
        if every_n_steps < 1 or horizon_steps % every_n_steps:
            raise UsageError(
                f"TailAverage: every_n_steps={every_n_steps} does not divide horizon_steps={horizon_steps}: give a "
                "divisor"
            )
        super().__init__(blend, validate)
        self.horizon_steps, self.every_n_steps = horizon_steps, every_n_steps
        self._taken = self._windows = 0  # weights in the running window, windows that have ended

    def begin(self) -> None:
        """Begin with the weights as they are, which count until the first are taken in."""
        assert self.weights is not None
        self.terms = {_LAST: self.weights.copies(), _RUNNING: self.weights.copies()}
        self.parts = {_LAST: 1.0}
        self._taken = self._windows = 0

    def advance(self, trainer: Any) -> None:
        """Take in the weights if it is their turn, and end the window where it ends."""
        assert self.weights is not None
        before = window_position(self.step, trainer.max_steps)
        here = window_position(trainer.global_step, trainer.max_steps)
        if here // self.every_n_steps == before // self.every_n_steps:
            return
        self._taken += 1
        self.weights.move(self.terms[_RUNNING], 1 / self._taken)
        done = here % self.horizon_steps / self.horizon_steps
        if here // self.horizon_steps != before // self.horizon_steps:
            self.terms = {_LAST: self.terms[_RUNNING], _RUNNING: self.terms[_LAST]}
            self._taken, self._windows, done = 0, self._windows + 1, 0.0
        if self._windows == 0:
            self.parts = {_RUNNING: 1.0}
        else:
            self.parts = {_LAST: 1 - done, _RUNNING: done}

    def progress(self) -> dict[str, int]:
        """The steps, weights and windows so far."""
        return {**super().progress(), "taken": self._taken, "windows": self._windows}

    def load_progress(self, progress: Mapping[str, int]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._taken, self._windows = progress["taken"], progress["windows"]
