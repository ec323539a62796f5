"""The arithmetic of EMA and TailAverage: averages of a module's weights, and their exchange with the weights."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.tensors import blended, local, sharded_like
from lightning_tricks.parallel.shard import drop_gathered

_RUNNING_STATISTICS = ("running_mean", "running_var")  # of batch norm: they belong to the weights
_BUCKET_BYTES = 256 << 20  # bound of the fp32 copies of weights of another dtype
_CHUNK = 16 << 20  # elements that are exchanged at a time


class AveragedWeights:
    """A module's trained weights, and what averages of them need.

    The weights are the parameters that are trained, and the running statistics of batch norm. An average is a list of
    tensors, one for each weight: of a weight in shards, this process's shard. All arithmetic is element by element, so
    no process waits for another. Averages of bf16 and fp16 weights are in fp32: with a decay of 0.999 an update is
    smaller than half the spacing of bf16, and would be rounded away.

    Args:
        module: with its weights where they are trained; a module that FSDP2 has sharded must not be gathered.
        averaged: names of parameters that an average has already, though they may be frozen now.

    Attributes:
        module: the module.
        tensors: its weights.
        names: all names of each weight, without the prefixes of wrappers; tied weights have several.
    """

    def __init__(self, module: nn.Module, averaged: Collection[str] = ()) -> None:
        self.module = module
        self.names: list[list[str]] = []
        self.tensors: list[Tensor] = []
        self.find(averaged)

    def find(self, averaged: Collection[str] = ()) -> int:
        """Add the weights that are trained now and were not before, behind the others; returns their number."""
        known, known_names = set(self.tensors), {name for own in self.names for name in own}
        parameters = self.module.named_parameters(remove_duplicate=False)
        buffers = self.module.named_buffers(remove_duplicate=False)
        trained = [(name, one) for name, one in parameters if one.requires_grad or clean_name(name) in averaged]
        statistics = [(name, buffer) for name, buffer in buffers if name.endswith(_RUNNING_STATISTICS)]
        names: dict[Tensor, list[str]] = {}
        for full_name, tensor in [*trained, *statistics]:
            name = clean_name(full_name)
            if tensor.is_floating_point() and tensor not in known and name not in known_names:
                names.setdefault(tensor, []).append(name)
        self.names += names.values()
        self.tensors += names
        self._buckets = list(_buckets(self.tensors))
        return len(names)

    @property
    def nbytes(self) -> int:
        """Bytes of one average on this process."""
        return sum(values(tensor).numel() * _wide(tensor.dtype).itemsize for tensor in self.tensors)

    @torch.no_grad()
    def copies(self, number: int = 0) -> list[Tensor]:
        """A first average: the weights as they are; of the last `number` of them, 0 for all."""
        return [values(tensor).to(_wide(tensor.dtype), copy=True) for tensor in self.tensors[-number:]]

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
        return {name: sharded_like(tensor, own) for names, tensor, own in triples for name in names}

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
                    f"here, and has {there}: resume with the module that was saved, or start a new run with --init_from"
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
    return part


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
    return torch.float64 if dtype == torch.float64 else torch.float32


class Swap:
    """Writes an average into the memory of the weights, and the weights back, to the bit.

    Where both have one dtype, the two exchange their contents, and no third copy is made. bf16 weights, and those that
    are blended with their average, are copied for as long as something else is in their place.

    Args:
        weights: what is averaged.
        average: of them.
        blend: see `blended`.
    """

    def __init__(self, weights: AveragedWeights, average: Sequence[Tensor], blend: float = 1.0) -> None:
        self._owner, self._average, self._blend = weights, average, blend
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []  # of the weights
        self._exchanged = 0  # number of weights that have changed places with their average

    @torch.no_grad()
    def enter(self) -> None:
        """Put the average in place."""
        drop_gathered(self._owner.module)
        self._weights = [values(tensor) for tensor in self._owner.tensors]
        same_dtype = all(one.dtype == other.dtype for one, other in zip(self._weights, self._average, strict=True))
        if same_dtype and self._blend == 1:
            for index in range(self._exchanged, len(self._average)):
                _exchange(self._weights[index], self._average[index])
                self._exchanged += 1
            return
        with torch.inference_mode(False):  # the copies outlive a validation that ends with an exception
            self._copies = [weight.clone() for weight in self._weights]
        for weight, mean in zip(self._weights, self._average, strict=True):
            weight.copy_(blended(weight, mean, self._blend))

    @torch.no_grad()
    def leave(self) -> None:
        """Put the weights back, as far as they are not in their place."""
        drop_gathered(self._owner.module)
        while self._exchanged:
            self._exchanged -= 1
            _exchange(self._weights[self._exchanged], self._average[self._exchanged])
        for weight, copy in zip(self._weights, self._copies, strict=False):
            weight.copy_(copy)
        self._copies = []


def _exchange(one: Tensor, other: Tensor) -> None:
    """Let two tensors of one dtype change their contents."""
    whole = not (one.is_contiguous() and other.is_contiguous())
    parts = [(one, other)] if whole else zip(one.view(-1).split(_CHUNK), other.view(-1).split(_CHUNK), strict=True)
    for here, there in parts:
        copy = here.clone()
        here.copy_(there)
        there.copy_(copy)
