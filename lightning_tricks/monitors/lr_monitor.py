"""Log the learning rate that each step used."""

from typing import Any

import torch

from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.objects import optimizer_index
from lightning_tricks.metrics.metric_buffer import MetricBuffer

__all__ = ["LRMonitor"]


class LRMonitor(pl.Callback):
    """Record `train/lr` of every optimizer step, as the step used it. Never changes training.

    It is the lr of the optimizer's first parameter group, without the group's `lr_scale` where `OptimizerMixin` set
    one; with several optimizers `train/lr/0`, `train/lr/1` and so on, in the order of `configure_optimizers`. An
    optimizer without a learning rate has no row: Lightning makes one up where `configure_optimizers` returns None, and
    Adafactor of transformers has the lr None where it finds its own.
    """

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer."""
        self._buffer = MetricBuffer.of(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Record: after the step, the schedule has moved on."""
        group: dict[str, Any] = next(iter(optimizer.param_groups), {})
        if group.get("lr") is None:
            return
        name = "train/lr" if len(trainer.optimizers) == 1 else f"train/lr/{optimizer_index(trainer, optimizer)}"
        # a Tensor, as torchao's optimizers hold, is filled in place by the schedule: the quotient is a new one
        self._buffer.record(name, group["lr"] / (group.get("lr_scale") or 1.0))
