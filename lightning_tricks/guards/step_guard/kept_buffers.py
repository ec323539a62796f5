"""The buffers of a module from before an optimizer step, put back on the device where the step is skipped.

A skipped step leaves the weights alone, but its forward pass has already changed the buffers: one NaN in a batch makes
BatchNorm's running mean NaN for good. Knows no Trainer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._core.tensors import local


class KeptBuffers:
    """Copies of a module's buffers, such as running statistics, counts of batches and codebooks.

    Left alone are buffers that cannot be written from a copy (lazy, sparse, quantized, expanded, made in inference
    mode), and those whose shape changes within the step, such as a cache that grows.

    Args:
        module: on its device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(name, layer._buffers) for name, layer in module.named_modules() if layer._buffers]
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self) -> None:
        """Copy the buffers: before the first forward pass of a step."""
        before, self._copies = self._copies, {}
        for place, buffer in self._buffers():
            copy = before.get(place)
            self._copies[place] = copy.copy_(buffer) if copy is not None and _alike(copy, buffer) else buffer.clone()

    def put_back(self, skip: Tensor) -> None:
        """Put the copies back if `skip`, a 0-dim tensor, is not 0. Does not wait for the device."""
        for place, buffer in self._buffers():
            copy = self._copies.get(place)
            if copy is not None and _alike(copy, buffer):
                torch.where(skip.to(buffer.device) != 0, copy, buffer, out=buffer)

    def _buffers(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """This process's numbers of each buffer that can be written from a copy, in its memory.

        Autograd knows nothing of them, so a write does not count as one to the buffer: graphs that have saved it can
        still run backward.
        """
        for layer, buffers in self._owners:
            for name, tensor in buffers.items():
                if tensor is not None and can_be_copied(tensor):
                    yield (layer, name), local(tensor).data


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def can_be_copied(tensor: Any) -> bool:
    """Whether a buffer can be written from a copy; see `KeptBuffers`."""
    if is_lazy(tensor) or tensor.is_inference() or tensor.layout != torch.strided or tensor.is_nested:
        return False
    part = local(tensor)
    expanded = any(size > 1 and stride == 0 for size, stride in zip(part.shape, part.stride(), strict=True))
    return type(part) is Tensor and part.numel() > 0 and not (part.is_meta or part.is_quantized or expanded)
