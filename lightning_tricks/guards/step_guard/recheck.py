"""Compute an optimizer step's gradients once more: the same batches, weights and random numbers as the first time."""

from typing import Any

from torch.optim import Optimizer

from lightning_tricks._random_state import random_state, set_random_state
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import repeat_micro_batches
from lightning_tricks.metrics.metric_buffer import MetricBuffer


class Recheck:
    """Keeps the micro-batches of the running step, each with the random state before it."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Any, int, dict[str, Any]]] = []

    def begin(self, batch: Any, batch_idx: int, first: bool) -> None:
        """Keep a micro-batch that is about to run; `first` of its step."""
        if first:
            self._micro_batches = []
        self._micro_batches.append((batch, batch_idx, random_state()))

    def run(self, trainer: Any, pl_module: Any, optimizer: Optimizer, buffer: MetricBuffer) -> None:
        """Replace the gradients by those of a second computation, not clipped yet; every rank must call.

        What the step had recorded in the buffer is replaced too; `self.log` keeps the values of the first computation.
        """
        after = random_state()
        states = iter([state for _, _, state in self._micro_batches])
        batches = [(batch, batch_idx) for batch, batch_idx, _ in self._micro_batches]
        with buffer.replacing(), replaced(pl_module, "log", _no_log), replaced(pl_module, "log_dict", _no_log):
            repeat_micro_batches(trainer, batches, optimizer, lambda: set_random_state(next(states)))
        set_random_state(after)


def _no_log(*args: Any, **kwargs: Any) -> None:
    """Stands for `self.log`, which would count the batch twice."""
