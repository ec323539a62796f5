"""Tell the last step of a run while it is running, also where several optimizers step in each batch."""

import math
from typing import Any

from lightning_tricks._trainer import batch_progress


class LastStep:
    """Answers the same before, between and after the optimizer steps of a batch.

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
