"""Keep the mean of the weights over the last steps, and validate with it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_tricks._errors import UsageError
from lightning_tricks.guards.averages.weight_average import WeightAverage

_LAST, _RUNNING = "last_window", "running_window"


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

    The steps are divided into windows of `horizon_steps`, the last of which ends with `max_steps`. At the end of a
    window the average is the mean over all of its steps. Within a window it moves from the mean of the window before to
    the mean of the running one, in proportion to the steps done, so that it never jumps and never stands still; before
    the end of the first window it is the mean since the start. Memory is that of two averages, whatever the horizon.

    Where the run's end moves, as in a resume with another `max_steps`, the running window ends with a window of the new
    end: it is between half a window and one and a half, unless the run ends before that. The average goes on from where
    it is.

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
        self._begun = self._end = 0  # steps at which the running window begins and ends; no end is known yet
        self._since, self._share = 0, 0.0  # a step, and the share of the running window's mean in the average then

    def begin(self) -> None:
        """Begin with the weights as they are, which count until the first are taken in."""
        assert self.weights is not None
        self.terms = {_LAST: self.weights.copies(), _RUNNING: self.weights.copies()}
        self.parts = {_LAST: 1.0}
        self._taken = self._windows = self._end = 0
        self._begun, self._since, self._share = self.step, self.step, 0.0

    def advance(self, trainer: Any) -> None:
        """Take in the weights if it is their turn, and end the window where it ends."""
        assert self.weights is not None
        self._plan(trainer.max_steps)
        here = trainer.global_step
        if (here - self._end) // self.every_n_steps == (self.step - self._end) // self.every_n_steps:
            return
        self._taken += 1
        self.weights.move(self.terms[_RUNNING], 1 / self._taken)
        done = self._done(here)
        if here >= self._end:
            self.terms = {_LAST: self.terms[_RUNNING], _RUNNING: self.terms[_LAST]}
            self._begun, self._since, self._share, done = self._end, self._end, 0.0, 0.0
            self._taken, self._windows = 0, self._windows + 1
            self._end = window_end(here, trainer.max_steps, self.horizon_steps)
        if self._windows == 0:
            self.parts = {_RUNNING: 1.0}
        else:
            self.parts = {_LAST: 1 - done, _RUNNING: done}

    def _done(self, step: int) -> float:
        """Share of the running window's mean: it grows evenly up to 1 at the window's end."""
        return self._share + (1 - self._share) * ((step - self._since) / (self._end - self._since))

    def _plan(self, max_steps: int) -> None:
        """Let the running window end with one of the run's windows, wherever the run's end is now."""
        end = window_end(self.step, max_steps, self.horizon_steps)
        if self._end == 0:
            self._end = end
        if (end - self._end) % self.horizon_steps == 0:
            return
        share = self._done(self.step)
        if 2 * (end - self._begun) < self.horizon_steps and (max_steps <= 0 or end < max_steps):
            end += self.horizon_steps
        self._since, self._share, self._end = self.step, share, end

    def progress(self) -> dict[str, Any]:
        """The steps, weights and windows so far."""
        window = {"begun": self._begun, "end": self._end, "since": self._since, "share": self._share}
        return {**super().progress(), "taken": self._taken, "windows": self._windows, **window}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._taken, self._windows = progress["taken"], progress["windows"]
        if "end" in progress:
            self._begun, self._end = progress["begun"], progress["end"]
            self._since, self._share = progress["since"], progress["share"]
        else:  # of release 0.1.0, whose windows all have the same length
            done = round(self.parts.get(_RUNNING, 0.0) * self.horizon_steps) if self._windows else 0
            self._begun = self._since = self.step - done - self.step % self.every_n_steps
            self._end, self._share = (self._since + self.horizon_steps if self._windows else 0), 0.0
