"""The buffers of a module from before an optimizer step, put back on the device where the step is skipped.

A skipped step leaves the weights alone, but its forward pass has already changed the buffers: one NaN in a batch makes
BatchNorm's running mean NaN for good. Knows no Trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._tensors import local

_ALIGN = 2  # words of int64 at a multiple of which each copy begins: as many bytes as the largest dtype has


class KeptBuffers:
    """Copies of the buffers that training changes, such as running statistics, counts of batches and codebooks.

    At first every buffer is copied before each step. `find_constants`, called after some steps, finds the layers whose
    buffers no step has changed: rotary tables, masks. They are not copied again; only torch's count of the writes to
    them (`Tensor._version`) is compared, and a layer that is written after all is copied from then on. A whole layer,
    because torch does not count all writes: those to BatchNorm's `num_batches_tracked`, but not to `running_mean`.

    Left alone are buffers that cannot be written from a copy (lazy, sparse, quantized, expanded, made in inference
    mode), and those whose shape changes within the step, such as a cache that grows.

    Args:
        module: on its device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._constant: dict[str, _Constant] = {}
        buffers = _buffers_of(module)
        self._first = {name: buffer.values().clone() for name, buffer in buffers.items()}  # until constants are found
        self._kept = _Copies(buffers, {})

    @property
    def nbytes(self) -> int:
        """Bytes that are copied before each step."""
        return self._kept.nbytes

    def save(self) -> None:
        """Copy the buffers: before the first forward pass of a step."""
        self._wake()
        if not self._kept.take():
            found = _buffers_of(self._module)
            self._kept = _Copies({name: found[name] for name in found if name not in self._constant}, {})

    def put_back(self, skip: Tensor) -> None:
        """Put the copies back if `skip`, a 0-dim tensor, is not 0. Does not wait for the device."""
        self._wake()
        self._kept.put_back(skip)

    def find_constants(self) -> None:
        """Copy no layer any more whose buffers have the values of the beginning. Reads the device; idempotent."""
        first, self._first = self._first, {}
        if not first:
            return
        found = _buffers_of(self._module)
        changing = {
            buffer.layer
            for name, buffer in found.items()
            if name not in first or not torch.equal(_bytes(buffer.values()), _bytes(first[name]))
        }
        for name, buffer in found.items():
            if buffer.layer not in changing:
                self._constant[name] = _Constant(buffer, buffer.tensor, buffer.tensor._version, first[name])
        rest = {name: buffer for name, buffer in found.items() if buffer.layer in changing}
        self._kept = _Copies(rest, self._kept.by_name())

    def _wake(self) -> None:
        """Copy the layers whose constants have been written, from the last values of these on."""
        layers = {each.buffer.layer for each in self._constant.values() if each.is_written()}
        if not layers:
            return
        woken = {name: each for name, each in self._constant.items() if each.buffer.layer in layers}
        self._constant = {name: each for name, each in self._constant.items() if name not in woken}
        buffers = {**self._kept.buffers, **{name: each.buffer for name, each in woken.items()}}
        self._kept = _Copies(buffers, {**self._kept.by_name(), **{name: each.value for name, each in woken.items()}})


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where a layer holds a buffer."""

    layer: str
    place: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Any:
        # that of a ScriptModule has no `get`
        return self.place[self.name] if self.name in self.place else None  # noqa: SIM401

    def values(self) -> Tensor:
        """This process's numbers, in the same memory, of which autograd knows nothing.

        A write to them does not count as one to the buffer: graphs that have saved it can still run backward.
        """
        tensor = self.place[self.name]
        return tensor.data if type(tensor) is Tensor else local(tensor).data


@dataclass(frozen=True, slots=True)
class _Constant:
    """A buffer that no step has changed: the tensor, torch's count of the writes to it, and its values."""

    buffer: _Buffer
    tensor: Tensor
    version: int
    value: Tensor

    def is_written(self) -> bool:
        buffer, tensor = self.buffer, self.tensor
        return tensor._version != self.version or buffer.tensor is not tensor


class _Copies:
    """Copies of buffers, in one block of memory for each device.

    Args:
        buffers: by name.
        values: to begin with, by name; else the present ones.
    """

    def __init__(self, buffers: Mapping[str, _Buffer], values: Mapping[str, Tensor]) -> None:
        self.buffers = dict(buffers)
        tensors = {name: buffer.values() for name, buffer in buffers.items()}
        sizes: dict[torch.device, int] = {}
        words: dict[str, tuple[int, int]] = {}  # first and end of each copy
        for name, tensor in tensors.items():
            first = sizes.get(tensor.device, 0)
            sizes[tensor.device] = first - _ALIGN * (-tensor.numel() * tensor.itemsize // (8 * _ALIGN))
            words[name] = first, sizes[tensor.device]
        # in each block the copies, and room in which they are joined with the present values; of int64, so that one
        # operation selects among buffers of any dtype
        self._blocks = {
            device: torch.zeros(2, size, dtype=torch.int64, device=device) for device, size in sizes.items()
        }
        self._copies, self._room = (
            [_like(tensor, self._blocks[tensor.device][row, slice(*words[name])]) for name, tensor in tensors.items()]
            for row in range(2)
        )
        for name, copy in self.by_name().items():
            copy.copy_(values[name] if name in values and values[name].shape == copy.shape else tensors[name])

    @property
    def nbytes(self) -> int:
        return sum(block[0].nbytes for block in self._blocks.values())

    def by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.buffers, self._copies, strict=True))

    def take(self) -> bool:
        """Copy the present values; False where the buffers have other shapes, dtypes or devices than at the start."""
        if not self.buffers:
            return True
        copies, _, tensors = self._pairs()
        _copy(copies, tensors)
        return len(tensors) == len(self._copies)

    def put_back(self, skip: Tensor) -> None:
        """Write the copies into the buffers if `skip`, a 0-dim tensor, is not 0."""
        if not self.buffers:
            return
        _, room, tensors = self._pairs()
        _copy(room, tensors)
        for device, (copies, present) in self._blocks.items():
            torch.where(skip.to(device) != 0, copies, present, out=present)
        _copy(tensors, room)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Copies, rooms and present values of the buffers that are as they were at the start."""
        copies, rooms, tensors = [], [], []
        for buffer, copy, room in zip(self.buffers.values(), self._copies, self._room, strict=True):
            if buffer.tensor is None:
                continue
            tensor = buffer.values()
            if tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.device == copy.device:
                copies.append(copy)
                rooms.append(room)
                tensors.append(tensor)
        return copies, rooms, tensors


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One call for each dtype: of mixed ones torch makes a call for each tensor."""
    for dtype in {tensor.dtype for tensor in targets}:
        chosen = [index for index, tensor in enumerate(targets) if tensor.dtype == dtype]
        torch._foreach_copy_([targets[index] for index in chosen], [sources[index] for index in chosen])


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's numbers: torch compares some dtypes in no other way."""
    return tensor.reshape(-1).view(torch.uint8)


def _like(tensor: Tensor, words: Tensor) -> Tensor:
    """The memory `words` as a tensor of the shape and dtype of another one."""
    return words.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)


def _buffers_of(module: nn.Module) -> dict[str, _Buffer]:
    """The buffers that can be written from a copy, by name."""
    found = {}
    for layer, owner in module.named_modules():
        for name, tensor in owner._buffers.items():
            if tensor is not None and can_be_copied(tensor):
                found[f"{layer}.{name}"] = _Buffer(layer, owner._buffers, name)
    return found


def can_be_copied(tensor: Tensor) -> bool:
    """Whether a buffer can be written from a copy; see `KeptBuffers`."""
    if is_lazy(tensor) or tensor.is_inference() or tensor.layout != torch.strided or tensor.is_nested:
        return False
    part = local(tensor)
    expanded = any(size > 1 and stride == 0 for size, stride in zip(part.shape, part.stride(), strict=True))
    return type(part) is Tensor and part.numel() > 0 and not (part.is_meta or part.is_quantized or expanded)
