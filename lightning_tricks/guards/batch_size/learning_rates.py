"""Learning rates by the size of the global batch: a factor of the step over whatever schedule a run has."""

from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks._trainer import unwrapped
from lightning_tricks.schedules import ScheduleLR, WarmupConstant

LRRule = Literal["none", "linear", "sqrt"]
_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def lr_factor(batch: float, reference: float, rule: LRRule) -> float:
    """The factor of the learning rate for a batch: (batch / reference) to the power of 1, 1/2 or 0."""
    return float((batch / reference) ** _POWERS[rule])


class LearningRates:
    """Multiplies the learning rates of all groups by a factor of the step, over the run's schedule.

    Make it in `on_fit_start`: then the optimizers have the recipe's learning rates, and a checkpoint is loaded later.

    Args:
        trainer: in `fit`.
        who: name for messages.
        factor: of the optimizer step; 1.0 leaves a learning rate as it is, to the bit.

    Raises:
        UsageError: the learning rate is set by something else than ScheduleLR: a factor over a rate that follows from
            the rate before it would multiply at each step.
    """

    def __init__(self, trainer: Any, who: str, factor: Callable[[int], float]) -> None:
        self._factor = factor
        self._lag = 0  # optimizer steps that the scheduler has not counted: those that fp16 skipped
        if not trainer.lr_scheduler_configs:
            trainer.lr_scheduler_configs.extend(_constant(optimizer) for optimizer in trainer.optimizers)
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, ScheduleLR) or config.interval != "step" or config.frequency != 1:
                raise UsageError(
                    f"{who}: {type(config.scheduler).__name__} sets the learning rate (interval {config.interval}, "
                    f"frequency {config.frequency}): give it to ScheduleLR with interval step and frequency 1, or put "
                    "the factor into your scheduler"
                )
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for scheduler in self._schedulers:
            scheduler.scale_by(self._at)

    def _at(self, step: int) -> float:
        """The factor at a step of the scheduler."""
        return self._factor(step + self._lag)

    def refresh(self) -> None:
        """Set the learning rates anew: the factor has another value now."""
        for scheduler in self._schedulers:
            scheduler.refresh()

    def begin_step(self, step: int) -> None:
        """Set the learning rates of a step that begins, where the scheduler has counted fewer steps."""
        for scheduler in self._schedulers:
            if (lag := step - scheduler.last_epoch) != self._lag:
                self._lag = lag
                self.refresh()


def _constant(optimizer: Any) -> Any:
    """A constant learning rate, as Lightning holds a scheduler."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer  # inside DeepSpeed's, with the same groups
    scheduler = ScheduleLR(optimizer, WarmupConstant(warmup_steps=0))
    return pl.utilities.types.LRSchedulerConfig(scheduler, interval="step")
