"""Keep the mean of the weights over the last steps, and validate with it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints.open_checkpoint import MEAN
from lightning_tricks.guards.averages.weight_average import WeightAverage

__all__ = ["TailAverage"]

_RUNNING = "running"


def window_end(step: int, max_steps: int, horizon_steps: int) -> int:
    """The end of the window in which a step lies, after it: windows end at `max_steps`, and every horizon before it.

    Args:
        step: number of optimizer steps done.
        max_steps: the run's last step; -1 or 0 where it has none, then windows are counted from step 0.
        horizon_steps: of a window.
    """
    return step + ((max(max_steps, 0) - step) % horizon_steps or horizon_steps)


class TailAverage(WeightAverage):
    """Keeps the mean of the weights over the last steps, and has validation, test and predict use it; training itself
    stays as it is to the bit.

    The steps are divided into windows of `horizon_steps`, the last of which ends with `max_steps`. The average is the
    mean over all steps of the last whole window; before the end of the first one it is the mean since the start. Memory
    is that of two averages, whatever the horizon.

    Where the run's end moves, as in a resume with another `max_steps`, the running window ends with a window of the new
    end: it is between half a window and one and a half, unless the run ends before that.

    Everything else is as in `EMA`: shards, fp32, exchange in place, checkpoints, `val/tail_average_share`. Its name in
    `generate --average` is `tail_average`.

    Args:
        horizon_steps: optimizer steps of a window, as `trainer.global_step` counts them; 500 is that of the source. For
            long runs about one percent of the steps.
        every_n_steps: steps between two weights that are taken in; a divisor of `horizon_steps`.
        validate: whether validation, test and predict use the average; if not, it is kept and saved only.

    Raises:
        UsageError: an option out of range; otherwise see `EMA`.

    Source: `WeightAverager` of https://github.com/epfml/schedules-and-scaling, for Haegele et al. 2024,
        https://arxiv.org/abs/2405.18392 (windows of 500 steps); Sanyal et al. 2023, https://arxiv.org/abs/2306.03241.
    """

    NAME: ClassVar[str] = "tail_average"

    def __init__(self, horizon_steps: int = 500, every_n_steps: int = 1, validate: bool = True) -> None:
        if horizon_steps < 1:
            raise UsageError(f"TailAverage: horizon_steps={horizon_steps}: give at least 1")
        if every_n_steps < 1 or horizon_steps % every_n_steps:
            raise UsageError(
                f"TailAverage: every_n_steps={every_n_steps} does not divide horizon_steps={horizon_steps}: give a "
                "divisor"
            )
        super().__init__(validate)
        self.horizon_steps, self.every_n_steps = horizon_steps, every_n_steps
        self._taken = self._windows = 0  # weights in the running window, windows that have ended
        self._begun = self._end = 0  # steps at which the running window begins and ends; no end is known yet

    def begin(self) -> None:
        """Begin with the weights as they are, which count until the first are taken in."""
        assert self.weights is not None
        self.terms = {MEAN: self.weights.copies(), _RUNNING: self.weights.copies()}
        self._taken = self._windows = self._end = 0
        self._begun = self.step

    def advance(self, trainer: Any) -> None:
        """Take in the weights if it is their turn, and end the window where it ends."""
        assert self.weights is not None
        self._plan(trainer.max_steps)
        here = trainer.global_step
        if (here - self._end) // self.every_n_steps == (self.step - self._end) // self.every_n_steps:
            return
        self._taken += 1
        for kind in (_RUNNING, *([] if self._windows else [MEAN])):
            self.weights.move(self.terms[kind], 1 / self._taken)
        if here >= self._end:
            self.terms = {MEAN: self.terms[_RUNNING], _RUNNING: self.terms[MEAN]}
            self._begun, self._taken, self._windows = self._end, 0, self._windows + 1
            self._end = window_end(here, trainer.max_steps, self.horizon_steps)

    def _plan(self, max_steps: int) -> None:
        """Let the running window end with one of the run's windows, wherever the run's end is now."""
        end = window_end(self.step, max_steps, self.horizon_steps)
        if self._end == 0:
            self._end = end
        if (end - self._end) % self.horizon_steps == 0:
            return
        if 2 * (end - self._begun) < self.horizon_steps and (max_steps <= 0 or end < max_steps):
            end += self.horizon_steps
        self._end = end

    def progress(self) -> dict[str, Any]:
        """The steps, weights and windows so far."""
        window = {"begun": self._begun, "end": self._end}
        return {**super().progress(), "taken": self._taken, "windows": self._windows, **window}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._taken, self._windows = progress["taken"], progress["windows"]
        self._begun, self._end = progress["begun"], progress["end"]
