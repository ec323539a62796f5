"""The values with which a sharded module starts: those of rank 0, on all ranks.

A module may come with values on each rank, with values on rank 0 alone, or with none (parameters on the meta device).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks.strategies.agreement import on_all_ranks
from lightning_tricks.strategies.broadcast import broadcast


class Rank0State:
    """Rank 0's values of a module that the other ranks hold on the meta device, set aside until it is sharded.

    Args:
        module: on rank 0 with values, which it loses; on the other ranks meta.
    """

    def __init__(self, module: nn.Module) -> None:
        self.state: dict[str, Any] = {}
        self.buffers: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            self.state = module.state_dict()
            self.buffers = {name: buffer for name, buffer in module.named_buffers() if name not in self.state}
            _to_meta(module)

    def scatter(self, module: nn.Module, device: torch.device) -> None:
        """Fill the sharded `module`, which is meta, on every rank; every rank must call."""
        _materialize(module, device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, self.state, options=options)
        persistent = module.state_dict().keys()
        others = {name: buffer for name, buffer in module.named_buffers() if name not in persistent}
        for name, buffer in others.items():
            buffer.copy_(self.buffers.get(name, buffer))
        broadcast(others.values(), device)


def init_weights(module: Any, device: torch.device) -> None:
    """Fill a module on the meta device, sharded or not, by its own `init_weights`; every rank must call.

    Random numbers come from rank 0's random state on every rank, so that shards are parts of one initialization and
    model replicas are equal; afterwards a rank whose state was another goes on from its own.
    """
    _materialize(module, device)
    with _random_state_of_rank_0(device):
        module.init_weights()
    _copy_between_replicas(module, device)


def _to_meta(module: nn.Module) -> None:
    """Move all tensors to the meta device; unlike `module.to`, tied parameters stay tied, with their attributes."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    meta = tensor.detach().to("meta")
                    if isinstance(tensor, nn.Parameter):
                        meta = nn.Parameter(meta, tensor.requires_grad)
                        meta.__dict__.update(tensor.__dict__)
                    moved[tensor] = meta
                tensors[name] = moved[tensor]  # type: ignore[assignment]


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory on `device`, without values; tied ones stay tied."""
    ties: dict[Tensor, list[tuple[Any, str]]] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, DTensor):  # those keep their identity
                    ties.setdefault(tensor, []).append((tensors, name))
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for tensor, ((tensors, name), *others) in ties.items():
        tensors[name].__dict__.update(tensor.__dict__)
        for other, other_name in others:
            other[other_name] = tensors[name]


@contextmanager
def _random_state_of_rank_0(device: torch.device) -> Iterator[None]:
    """Random state of rank 0, and its seed, on every rank; every rank must enter."""
    own = _random_state(device)
    drawn_from = [state.clone() for state in own]
    broadcast(drawn_from, device)
    if all(map(torch.equal, own, drawn_from)):
        yield  # and go on after what was drawn, as one process would
        return
    _set_random_state(drawn_from, device)
    try:
        yield
    finally:
        _set_random_state(own, device)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _copy_between_replicas(module: nn.Module, device: torch.device) -> None:
    """Give each rank the values of the first rank that holds the same shard, or the same whole tensor."""
    tensors = [*module.parameters(), *module.buffers()]
    broadcast([tensor for tensor in tensors if not isinstance(tensor, DTensor)], device)
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            for dim, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    broadcast([tensor.to_local()], device, tensor.device_mesh.get_group(dim))


def has_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values yet."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def refuse_unfillable(module: Any) -> None:
    """Refuse a module with meta tensors and no `init_weights`, before anything is sharded."""
    if has_meta(module) and not callable(getattr(module, "init_weights", None)):
        raise UsageError(
            f"{type(module).__name__} builds parameters on the meta device and has no method init_weights to fill "
            "them: write one, or build it as usual and set init_on_rank_0 of the strategy"
        )


def refuse_other_modules(module: nn.Module) -> None:
    """Refuse ranks that have built different modules, whose collectives would not fit; every rank must call."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    own = {name: f"{tuple(tensor.shape)} of {tensor.dtype}".replace("torch.", "") for name, tensor in tensors}
    hashes = on_all_ranks(lambda: hashlib.sha256(repr(own).encode()).digest())
    if len(set(hashes)) == 1:
        return
    built = on_all_ranks(lambda: own)
    rank = next(rank for rank, found in enumerate(hashes) if found != hashes[0])
    raise UsageError(
        f"rank {rank} has built another module than rank 0: {_difference(built[rank], built[0])}: "
        "build the same one on all ranks, tied parameters included"
    )


def _difference(there: dict[str, str], on_rank_0: dict[str, str]) -> str:
    for name in [*on_rank_0, *there]:
        if name not in there:
            return f"it has no '{name}'"
        if name not in on_rank_0:
            return f"it has '{name}'"
        if there[name] != on_rank_0[name]:
            return f"'{name}' is {there[name]} in place of {on_rank_0[name]}"
    return "its parameters come in another order"
