"""The largest of a value over all ranks, some of which may not have it: a block need not run on every rank."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_tricks.metrics.metric_buffer import MetricBuffer, Row

_MISSING = float("-inf")


class LargestOfRanks:
    """Record values by metric, and log the largest over ranks of those that any rank has.

    Every rank hands over equally many numbers, whatever it has: else a collective would never end.

    Args:
        buffer: to record in.
        metrics: all names that may come, the same on every rank.
    """

    def __init__(self, buffer: MetricBuffer, metrics: list[str]) -> None:
        self._buffer, self._metrics = buffer, metrics
        buffer.at_flush(self._read)

    def record(self, found: Mapping[str, Tensor], device: torch.device) -> None:
        """Keep the scalar tensors `found` of the running step, by metric."""
        missing = torch.full((), _MISSING, device=device)
        values = [found.get(metric, missing).to(device, torch.float32) for metric in self._metrics]
        self._buffer.record_all(tuple(f"_{metric}" for metric in self._metrics), torch.stack(values), "max")

    def _read(self, rows: list[Row]) -> dict[str, float]:
        values = {metric: rows[-1].values.get(f"_{metric}", _MISSING) for metric in self._metrics}
        return {metric: value for metric, value in values.items() if value != _MISSING}
