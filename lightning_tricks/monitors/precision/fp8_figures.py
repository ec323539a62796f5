"""What is recorded of fp8 layers: the largest values over ranks, the mean share that is lost, and the worst of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_tricks.metrics.largest_of_ranks import LargestOfRanks
from lightning_tricks.metrics.metric_buffer import MetricBuffer, Row

AMAX = ("input_amax", "weight_amax")
UNDERFLOW = ("input_underflow", "weight_underflow")
RANKS = "ranks"  # how many have the layer's figures


class Fp8Figures:
    """Record the four figures of each layer, and log them with the largest `input_underflow` of all layers.

    Every rank hands over equally many numbers, whichever layers ran on it: else a collective would never end.

    Args:
        buffer: to record in.
        layers: all names that may come, the same on every rank.
    """

    def __init__(self, buffer: MetricBuffer, layers: list[str]) -> None:
        self._buffer, self._layers = buffer, layers
        self._largest = LargestOfRanks(buffer, [f"fp8/{layer}/{name}" for layer in layers for name in AMAX])
        self._sums = tuple(f"_fp8/{layer}/{part}" for layer in layers for part in (*UNDERFLOW, RANKS))
        buffer.at_flush(self._means)

    def record(self, found: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """Keep the scalar tensors of the running step, by layer and name."""
        amax = {f"fp8/{layer}/{name}": stats[name] for layer, stats in found.items() for name in AMAX}
        self._largest.record(amax, device)
        zero, one = torch.zeros((), device=device), torch.ones((), device=device)
        absent = {**dict.fromkeys(UNDERFLOW, zero), RANKS: zero}
        parts = [{**found[layer], RANKS: one} if layer in found else absent for layer in self._layers]
        values = [part[name].to(device, torch.float32) for part in parts for name in (*UNDERFLOW, RANKS)]
        self._buffer.record_all(self._sums, torch.stack(values), "sum")

    def _means(self, rows: list[Row]) -> dict[str, float]:
        values = rows[-1].values
        ranks = {layer: values.get(f"_fp8/{layer}/{RANKS}", 0.0) for layer in self._layers}
        means = {
            f"fp8/{layer}/{name}": values[f"_fp8/{layer}/{name}"] / number
            for layer, number in ranks.items()
            for name in UNDERFLOW
            if number
        }
        of_inputs = [share for name, share in means.items() if name.endswith(UNDERFLOW[0])]
        return means | ({"precision/fp8_underflow_max": max(of_inputs)} if of_inputs else {})
