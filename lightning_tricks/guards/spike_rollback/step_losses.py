"""The loss of each optimizer step, as a mean over ranks, in the values of the logging interval."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._trainer import logging_step
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.optim.grad_scaler import loss_scale

_LOSS, _RANKS = "_spike_rollback/loss", "_spike_rollback/ranks"  # in the buffer: sums over ranks


class StepLosses:
    """Adds up the losses of a step's backward passes, and gives them back when they have come to the host."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # since the last optimizer step
        self._begun: dict[int, int] = {}  # by logging step, `trainer.global_step` before it, of the steps not read yet

    @property
    def within_step(self) -> bool:
        """Whether a backward pass has been made since the last optimizer step."""
        return bool(self._parts)

    def begin(self, trainer: Any) -> None:
        """Note which step runs."""
        self._begun[logging_step(trainer)] = trainer.global_step

    def add(self, trainer: Any, loss: Tensor) -> None:
        """Keep a loss, which the Trainer has divided by the number of micro-batches, and fp16 has multiplied."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = loss_scale(scaler) if scaler is not None and scaler.is_enabled() else None
        loss = loss.detach().float()
        self._parts.append(loss if scale is None else loss / scale.to(loss.device))

    def record(self, trainer: Any, buffer: MetricBuffer) -> None:
        """Give the step's loss to the buffer; every rank must call."""
        device = trainer.strategy.root_device
        parts = [part.to(device) for part in self._parts] or [torch.zeros((), device=device)]
        counted = torch.full((), float(self.within_step), device=device)
        buffer.record_all((_LOSS, _RANKS), torch.stack([torch.stack(parts).sum(), counted]), "sum")

    def drop(self) -> None:
        """Forget the losses of the running step."""
        self._parts = []

    def read(self, rows: Sequence[Row]) -> Iterator[tuple[int, float]]:
        """The steps of an interval that had a loss: `trainer.global_step` before each, and the mean over ranks."""
        for row in rows:
            step, ranks = self._begun.get(row.step), row.values.get(_RANKS, 0)
            if step is not None and ranks:
                yield step, row.values[_LOSS] / ranks
        self._begun = {row: step for row, step in self._begun.items() if row > rows[-1].step}
