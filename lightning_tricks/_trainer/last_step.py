"""The last step of a run: whether the running one is it, and whether the one that is done was it."""

import math
from typing import Any

from lightning_tricks._trainer.loop import batch_progress


def is_last_step(trainer: Any) -> bool:
    """When an optimizer step is done: whether training stops after it, at `max_steps` or because it was asked to.

    The end of the last epoch does not count. Read from `_FitLoop.done` (loops/fit_loop.py).
    """
    loop = trainer.fit_loop
    at_end = loop.max_steps != -1 and loop.epoch_loop.global_step >= loop.max_steps
    return at_end or (trainer.should_stop and loop._can_stop_early)


class LastStep:
    """Tells the last step while it runs: the same before, between and after the optimizer steps of a batch.

    `max_steps` counts the steps of each optimizer. How many a batch makes is known only after it, so the most that any
    batch has made counts: where batches make different numbers, a step shortly before the last may pass for it too.
    """

    def __init__(self) -> None:
        self._before = 0  # `trainer.global_step` when the running batch began
        self._most = 1  # optimizer steps in a batch

    def begin(self, trainer: Any) -> None:
        """Training begins: until a batch has ended, it is taken to step each optimizer once."""
        self._before, self._most = trainer.global_step, max(len(trainer.optimizers), 1)

    def end_batch(self, trainer: Any) -> None:
        """Count the optimizer steps of the batch that ends."""
        self._most = max(self._most, trainer.global_step - self._before)
        self._before = trainer.global_step

    def is_running(self, trainer: Any) -> bool:
        """Whether the running batch is the last of the run, by `max_steps`, `max_epochs` or a wish to stop."""
        if trainer.should_stop or 0 < trainer.max_steps - self._before <= self._most:
            return True
        if trainer.current_epoch + 1 != trainer.max_epochs or not math.isfinite(trainer.num_training_batches):
            return False
        accumulated: int = trainer.accumulate_grad_batches
        left = trainer.num_training_batches - batch_progress(trainer).current.ready
        # the same for each micro-batch of a step, and the last step may have fewer
        return left < ((trainer.num_training_batches - 1) % accumulated + 1)
