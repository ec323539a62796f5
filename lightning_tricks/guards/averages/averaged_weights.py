"""The weights of a module that are averaged, and the arithmetic of averages in fp32. Knows no Trainer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name
from lightning_tricks._tensors import local, sharded_like

_RUNNING_STATISTICS = ("running_mean", "running_var")  # of batch norm: they belong to the weights
_BUCKET_BYTES = 256 << 20  # bound of the fp32 copies of weights of another dtype


class AveragedWeights:
    """A module's trained weights, and what averages of them need.

    The weights are the parameters that are trained when the object is made, and the running statistics of batch norm.
    An average is a list of tensors, one for each weight: of a weight in shards, this process's shard. All arithmetic is
    element by element, so no process waits for another. Averages of bf16 and fp16 weights are in fp32: with a decay of
    0.999 an update is smaller than half the spacing of bf16, and would be rounded away. Those of complex weights are of
    real and imaginary parts, one dimension more; in a checkpoint they are complex.

    Args:
        module: with its weights where they are trained; a module that FSDP2 has sharded must not be gathered.

    Attributes:
        module: the module.
        tensors: its weights.
        names: all names of each weight, without the prefixes of wrappers; tied weights have several.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = module.named_parameters(remove_duplicate=False)
        buffers = module.named_buffers(remove_duplicate=False)
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        statistics = [(name, buffer) for name, buffer in buffers if name.endswith(_RUNNING_STATISTICS)]
        names: dict[Tensor, list[str]] = {}
        for name, tensor in [*trained, *statistics]:
            if tensor.is_floating_point() or tensor.is_complex():
                names.setdefault(tensor, []).append(clean_name(name))
        self.names, self.tensors = list(names.values()), list(names)
        self._buckets = list(_buckets(self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of one average on this process."""
        return sum(values(tensor).numel() * _wide(tensor.dtype).itemsize for tensor in self.tensors)

    @torch.no_grad()
    def copies(self) -> list[Tensor]:
        """A first average: the weights as they are."""
        return [values(tensor).to(_wide(tensor.dtype), copy=True) for tensor in self.tensors]

    @torch.no_grad()
    def move(self, average: Sequence[Tensor], weight: float) -> None:
        """Set `average` to (1 - weight) * average + weight * weights. Does not wait for the device."""
        for bucket in self._buckets:
            own = [average[index] for index in bucket]
            current = [values(self.tensors[index]).to(own[0].dtype) for index in bucket]  # no copy of the same dtype
            if weight == 1:
                torch._foreach_copy_(own, current)  # also over NaN
            else:
                torch._foreach_lerp_(own, current, weight)

    @torch.no_grad()
    def by_name(self, average: Sequence[Tensor]) -> dict[str, Tensor]:
        """An average as a checkpoint holds it: under each name of the weight, in shards where the weight is."""
        triples = zip(self.names, self.tensors, average, strict=True)
        return {
            name: sharded_like(tensor, torch.view_as_complex(own) if tensor.is_complex() else own)
            for names, tensor, own in triples
            for name in names
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor], path: Any) -> list[Tensor]:
        """An average of a checkpoint, of which each process takes its shards.

        Raises:
            UsageError: the first weight of which the checkpoint has no average, or one of another shape.
        """
        average = []
        for (name, *_), tensor in zip(self.names, self.tensors, strict=True):
            value = saved.get(name)
            if value is None or value.shape != tensor.shape:
                there = "none" if value is None else f"one of shape {tuple(value.shape)}"
                raise UsageError(
                    f"ckpt_path={path}: it should have an average of '{name}' {tuple(tensor.shape)}, which is trained "
                    f"here, and has {there}: resume with the module that was saved, or start anew with --init_from"
                )
            if isinstance(tensor, DTensor) and not isinstance(value, DTensor):  # every rank has read the whole
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            own = torch.empty_like(values(tensor), dtype=_wide(tensor.dtype), requires_grad=False)
            average.append(own.copy_(values(value)))
        return average


def values(tensor: Tensor) -> Tensor:
    """This process's numbers of a weight as a plain tensor, in the same memory. Call it without gradients."""
    part = local(tensor)
    if hasattr(part, "__tensor_flatten__"):  # torchao's wrapper of a weight that is gathered in fp8
        names, _ = part.__tensor_flatten__()
        if len(names) == 1:
            return getattr(part, names[0])
    return torch.view_as_real(part) if part.is_complex() else part


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of weights of one device and dtype; where they are copied to fp32, no more than fit in the bound."""
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, tensor in enumerate(tensors):
        part, key = local(tensor), (local(tensor).device, tensor.dtype)
        size = 4 * part.numel() if tensor.dtype != _wide(tensor.dtype) else 0
        if groups.get(key) and sizes[key] + size > _BUCKET_BYTES:
            yield groups.pop(key)
            sizes[key] = 0
        groups.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + size
    yield from groups.values()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
