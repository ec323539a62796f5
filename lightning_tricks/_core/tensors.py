"""Tensors of a batch; the dtype in which a linear layer works; the shard of a tensor here, and its size as a whole."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a linear layer's output for the input `x`: autocast's dtype, or without autocast that of `x`.

    Cast a result that several layers use to this dtype once; otherwise autocast casts it again for each layer, forward
    and backward (2 to 5 % of a training step on a CPU).
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else x.dtype


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device, such as "cuda".

    `torch.compile` traces this into a constant. It could not trace `torch.amp.is_autocast_available` in torch 2.11.
    """
    # The meta device, on which a model is planned and not run, has no autocast and would raise.
    return device != "meta" and torch.is_autocast_enabled(device)


def widest(device: torch.device) -> torch.dtype:
    """The floating type with the most digits that a device has: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def where_read(value: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """A 0-dim `value` where an operation on `tensors` can read it: on the host if one of them lies there.

    A copy to the host has ended when this returns. Code that copies without a wait, as torch's fused optimizers and its
    GradScaler do, would read there what has not arrived.
    """
    devices = [tensor.device for tensor in tensors]
    return value.to(min(devices, key=lambda device: device.type != "cpu", default=value.device))


def whole_numel(parameter: Tensor) -> int:
    """Number of elements of a parameter as a whole; DeepSpeed's ZeRO, stage 3, leaves the tensor itself empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """`shard` as this rank's part of a DTensor that is sharded as `tensor` is; itself where `tensor` is no DTensor."""
    if not hasattr(tensor, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor  # here, as it takes long and is there already if a tensor is one

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def blended(weight: Tensor, average: Tensor, blend: float) -> Tensor:
    """(1 - blend) * weight + blend * average, in the dtype of the average; which it is where `blend` is 1."""
    return average if blend == 1 else weight.to(average.dtype).lerp(average, blend)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The dense tensors in any nesting of mappings, sequences and objects with attributes."""
    return (tensor for _, tensor in named_tensors_in(batch))


def named_tensors_in(batch: Any) -> Iterator[tuple[Any, Tensor]]:
    """The same, each with its key or attribute; members of a sequence have the name of the sequence.

    Each part is looked into once: objects may hold each other, as the nodes of a graph do.
    """
    seen: dict[int, Any] = {}  # by id, which no other one can get while it is kept here
    waiting: list[tuple[Any, Any]] = [(None, batch)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, Tensor):
            part = local(part)
            if part.layout == torch.strided and not part.is_nested and not part.is_quantized and part.numel():
                yield name, part
            continue
        if id(part) in seen or isinstance(part, type):
            continue
        if isinstance(part, Mapping):
            inside = [*part.items()]
        elif isinstance(part, tuple) and hasattr(part, "_fields"):
            inside = [*zip(part._fields, part, strict=True)]
        elif isinstance(part, list | tuple):
            inside = [(name, value) for value in part]
        elif hasattr(part, "__dict__"):
            inside = [*vars(part).items()]
        elif dataclasses.is_dataclass(part):  # with slots
            inside = [(field.name, getattr(part, field.name, None)) for field in dataclasses.fields(part)]
        else:
            continue
        seen[id(part)] = part
        waiting += reversed(inside)


def refuse_second_derivative(function: str, remedy: str) -> None:
    """Called in the `backward` of an `autograd.Function` whose result no derivative can be taken of.

    torch's `once_differentiable` does not do: `autograd.grad` goes past it, and takes such a derivative for zero.

    Raises:
        UsageError: the backward pass makes a graph.
    """
    if torch.is_grad_enabled():
        raise UsageError(f"create_graph=True: {function} has no second derivative: {remedy}")


class OverStages(NamedTuple):
    """Of a parameter of a pipeline stage, in its attribute `over_stages`: the norm is that of all stages.

    Attributes:
        group: the process group of the pipeline.
        counts: False of a copy of a weight that another stage counts.
    """

    group: Any
    counts: bool
