"""Put an average in the place of the weights for a while, and then the weights back, to the bit. Knows no Trainer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_tricks._trainer import is_a
from lightning_tricks.checkpoints.averages import RAW, mixed
from lightning_tricks.guards.averages.averaged_weights import AveragedWeights, values

_CHUNK = 16 << 20  # elements that are exchanged at a time


class Swap:
    """Writes an average into the memory of the weights, and the weights back.

    Where a single average of the weights' dtype takes their place, the two exchange their contents, and no third copy
    is made. Otherwise (bf16 weights, an average that is mixed with the weights) the weights are copied for as long as
    the average is in place.

    Args:
        weights: what is averaged.
        terms: averages by name.
        shares: see `mixed`.
    """

    def __init__(
        self, weights: AveragedWeights, terms: Mapping[str, Sequence[Tensor]], shares: Mapping[str, float]
    ) -> None:
        self._owner, self._terms = weights, terms
        self._shares = {name: share for name, share in shares.items() if share != 0}
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []  # of the weights
        self._exchanged = 0  # number of weights that have changed places with their average

    @torch.no_grad()
    def enter(self) -> None:
        """Put the average in place."""
        drop_gathered(self._owner.module)
        self._weights = [values(tensor) for tensor in self._owner.tensors]
        if average := self._single_average():
            for index in range(self._exchanged, len(average)):
                _exchange(self._weights[index], average[index])
                self._exchanged += 1
            return
        with torch.inference_mode(False):  # the copies outlive a validation that ends with an exception
            self._copies = [weight.clone() for weight in self._weights]
        for index, weight in enumerate(self._weights):
            weight.copy_(mixed(weight, {name: term[index] for name, term in self._terms.items()}, self._shares))

    @torch.no_grad()
    def leave(self) -> None:
        """Put the weights back, as far as they are not in their place."""
        drop_gathered(self._owner.module)
        average = self._single_average()
        while self._exchanged and average:
            self._exchanged -= 1
            _exchange(self._weights[self._exchanged], average[self._exchanged])
        for weight, copy in zip(self._weights, self._copies, strict=False):
            weight.copy_(copy)
        self._copies = []

    def _single_average(self) -> Sequence[Tensor] | None:
        """The average that takes the place of the weights as it is."""
        (name, *more) = self._shares
        if more or name == RAW:
            return None
        average = self._terms[name]
        same = all(one.dtype == other.dtype for one, other in zip(self._weights, average, strict=True))
        return average if same else None


def _exchange(one: Tensor, other: Tensor) -> None:
    """Let two tensors of one dtype change their contents."""
    whole = not (one.is_contiguous() and other.is_contiguous())
    parts = [(one, other)] if whole else zip(one.view(-1).split(_CHUNK), other.view(-1).split(_CHUNK), strict=True)
    for here, there in parts:
        copy = here.clone()
        here.copy_(there)
        there.copy_(copy)


def drop_gathered(module: nn.Module) -> None:
    """Have FSDP2 gather all parameters anew: it keeps the root's after a validation."""
    for part in module.modules():
        if is_a(part, "FSDPModule"):
            part.reshard()  # type: ignore[operator]
