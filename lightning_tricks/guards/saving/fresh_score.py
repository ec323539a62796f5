"""The monitored metric of the weights that are saved, and never that of earlier weights."""

import math
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import rank_zero_warn
from lightning_tricks._suggest import did_you_mean

_COUNTS = {"epoch": "current_epoch", "step": "global_step"}  # always there, by the Trainer's attribute


class FreshScore:
    """Reads a logged metric at a save, if it was logged for the weights that are saved.

    Lightning keeps the values of the last validation, which may be many steps old.

    Args:
        monitor: name of the metric, or `epoch` or `step`; None for no score.
    """

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self._validated: tuple[int, float | None] | None = None  # step and value of the last validation
        self._said: set[str] = set()

    def after_validation(self, trainer: Any) -> None:
        """Take note of the metric's value and of its step."""
        self._validated = (trainer.global_step, self._logged(trainer))

    def read(self, trainer: Any) -> float | None:
        """The score of the weights as they are; None where there is none, which is said once.

        Raises:
            UsageError: a validation has run, and no such metric is logged.
        """
        if self.monitor is None:
            return None
        value = self._logged(trainer)
        if self.monitor in _COUNTS:
            return value
        if value is None and self._validated and self.monitor not in trainer.callback_metrics:
            near = did_you_mean(self.monitor, list(trainer.callback_metrics))
            raise UsageError(f"SafeCheckpoint: monitor={self.monitor}: the run logs no such metric{near}")
        step = trainer.global_step
        stale = self._validated is not None and self._validated[0] != step and self._validated[1] == value
        if value is not None and not stale:
            return value
        if not stale and self.monitor in trainer.callback_metrics:
            number = float(trainer.callback_metrics[self.monitor])
            self._say_once(
                "not finite", f"{self.monitor} is {number} at step {step}: such a checkpoint cannot be the best"
            )
        else:
            self._say_once(
                "stale",
                f"{self.monitor} has no value for the weights of step {step}, so this checkpoint and later ones like "
                "it cannot be the best: let every_n_train_steps divide the steps between validations",
            )
        return None

    def _say_once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            rank_zero_warn(f"SafeCheckpoint: {line}")

    def _logged(self, trainer: Any) -> float | None:
        value = trainer.callback_metrics.get(self.monitor)
        if self.monitor in _COUNTS:  # as ModelCheckpoint does, also where they are not logged
            return float(int(getattr(trainer, _COUNTS[self.monitor]) if value is None else value))
        return float(value) if value is not None and math.isfinite(value) else None
