"""Turn any module into shards with FSDP2: its blocks one by one, then the rest with the root. Knows no Lightning.

Scalars have nothing to shard: each rank holds them whole, and their gradients are averaged after each backward pass.
All ranks start with rank 0's values, which rank 0 alone may hold; a module on the meta device fills itself.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import bound_to_buffers
from lightning_tricks._core.random_state import random_state, set_random_state
from lightning_tricks._core.tensors import local
from lightning_tricks.parallel.agreement import broadcast, on_all_ranks, on_rank_0


def shard_module(
    root: nn.Module,
    blocks: Collection[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool,
    ends: Collection[nn.Module] = (),
) -> None:
    """Replace all parameters of `root` but scalars by shards, which are gathered one block at a time.

    Values stay what they are on this rank, so they must be equal on all; meta tensors stay meta. Weights in another
    order of memory (channels_last) become contiguous.

    The root takes its inputs as they come: they are a batch, whose floats may be targets. Layers that compute with
    floating-point buffers (batch norm, spectral norm) keep their own type, as the buffers do.

    Args:
        root: any module; its forward, or a method that is registered as such, gathers the parameters of no block.
        blocks: submodules, the units of gathering, in the order of `root.modules()`.
        mesh: one dimension to shard over, or two: replicate over the first and shard over the second.
        policy: types in which weights are gathered and gradients reduced.
        offload: where the shards lie between the steps.
        reshard_after_forward: whether a block's weights are dropped after its forward pass and gathered again in the
            backward pass; those of the root never are.
        ends: embeddings and heads outside of the blocks, which are units too. A head's weights stay: its backward pass
            comes next.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    for parameter in root.parameters():
        parameter.data = parameter.data.contiguous()
    scalars = {parameter for parameter in root.parameters() if parameter.ndim == 0}
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": scalars}
    if policy.param_dtype is not None:
        for module in root.modules():
            if bound_to_buffers(module):
                fully_shard(module, reshard_after_forward=False, **options)
    for block in reversed(dict.fromkeys(blocks)):  # blocks inside others first, as `fully_shard` wants it
        if not isinstance(block, FSDPModule):
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    as_they_come = dataclasses.replace(policy, cast_forward_inputs=False)
    for end in ends:
        reshard = reshard_after_forward and isinstance(end, nn.Embedding)
        fully_shard(end, mp_policy=as_they_come, reshard_after_forward=reshard, **options)
    fully_shard(root, mp_policy=as_they_come, reshard_after_forward=False, **options)


def drop_gathered(module: nn.Module) -> None:
    """Have FSDP2 gather all parameters anew: it keeps the root's after a validation."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give each parameter, which becomes a new tensor, the attributes that it had, such as a mark for the optimizer."""
    before = {name: dict(vars(parameter)) for name, parameter in module.named_parameters() if vars(parameter)}
    yield
    for name, attributes in before.items():
        vars(module.get_parameter(name)).update(attributes)


class Scalars:
    """The scalars of a sharded module, by `names`: no shards, each rank holds them whole."""

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
        self._module = module

    @torch.no_grad()
    def average_gradients(self, device: torch.device, group: Any = None) -> None:
        """Give each scalar the mean of its gradient over the ranks of a group; each must call, after a backward pass.

        A rank that did not use a scalar adds 0; it stays without a gradient where no rank has one. Gradients of earlier
        micro-batches are equal on all ranks already, so they stay what they are.
        """
        scalars = [p for p in map(self._module.get_parameter, self.names) if p.requires_grad]  # `to` may replace them
        if not scalars or dist.get_world_size(group) == 1:
            return
        zero = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        sums = torch.stack(
            [zero if p.grad is None else p.grad.to(zero) for p in scalars]
            + [zero if p.grad is None else zero + 1 for p in scalars]
        )
        dist.all_reduce(sums, group=group)
        means, users = sums.div(dist.get_world_size(group)).chunk(2)
        for parameter, mean, used in zip(scalars, means, users, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif used > 0:
                parameter.grad = mean.to(parameter)


def largest_group(root: nn.Module, blocks: Collection[nn.Module]) -> int:
    """Elements of the largest of the groups whose parameters `shard_module` gathers together, on this rank."""
    sizes: list[int] = []
    taken: set[nn.Parameter] = set()
    for part in [*reversed(dict.fromkeys(blocks)), root]:  # blocks inside others first
        own = set(part.parameters()) - taken
        sizes.append(sum(local(parameter).numel() for parameter in own))
        taken |= own
    return max(sizes)


def local_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


class Rank0State:
    """Rank 0's values of a module that the other ranks hold on the meta device, kept aside until it is sharded."""

    def __init__(self, module: nn.Module) -> None:
        self.state: dict[str, Any] = {}
        self.buffers: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            self.state = module.state_dict()
            self.buffers = {name: buffer for name, buffer in module.named_buffers() if name not in self.state}
            to_meta(module)

    def scatter(self, module: nn.Module, device: torch.device) -> None:
        """Fill the sharded `module`, which is meta, on every rank; every rank must call."""
        materialize(module, device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, self.state, options=options)
        persistent = module.state_dict().keys()
        others = {name: buffer for name, buffer in module.named_buffers() if name not in persistent}
        for name, buffer in others.items():
            buffer.copy_(self.buffers.get(name, buffer))
        broadcast(others.values(), device)


def init_weights(module: Any, device: torch.device, group: Any = None) -> None:
    """Fill a module on the meta device, sharded or not, by its own `init_weights`; every rank must call.

    Random numbers come from rank 0's random state on every rank, so that shards are parts of one initialization and
    model replicas are equal; afterwards a rank whose state was another goes on from its own. `group` has the ranks with
    the same layers; None: all.
    """
    materialize(module, device)
    with _random_state_of_rank_0():
        module.init_weights()
    _copy_between_replicas(module, device, group)


def to_meta(module: nn.Module) -> nn.Module:
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
    return module


def materialize(module: nn.Module, device: torch.device) -> None:
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
def _random_state_of_rank_0() -> Iterator[None]:
    """Random state of rank 0 on every rank; every rank must enter."""
    own, there = random_state(), on_rank_0(random_state)
    if all(torch.equal(own[name], there[name]) for name in ("torch", "cuda") if name in own):
        yield  # and go on after what was drawn, as one process would
        return
    set_random_state(there)
    try:
        yield
    finally:
        set_random_state(own)


def _copy_between_replicas(module: nn.Module, device: torch.device, group: Any) -> None:
    """Give each rank the values of the first rank that holds the same shard, or the same whole tensor."""
    tensors = [*module.parameters(), *module.buffers()]
    broadcast([tensor for tensor in tensors if not isinstance(tensor, DTensor)], device, group)
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            for dim, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    broadcast([tensor.to_local()], device, tensor.device_mesh.get_group(dim))


def has_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values yet."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def refuse_unshardable(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse parameters that FSDP2 cannot shard, or trains wrongly: complex, sparse, shared by two blocks."""
    for path, part in module.named_modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            where = f"FSDP2Strategy: '{f'{path}.{name}'.lstrip('.')}' of {type(part).__name__}"
            if tensor.is_complex() and tensor.requires_grad:
                raise UsageError(f"{where} is complex, which FSDP2 cannot train: keep it as two real ones, or take ddp")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            where = f"FSDP2Strategy: '{path}.weight' of {type(part).__name__}"
            raise UsageError(f"{where} has sparse gradients, which FSDP2 cannot reduce: set sparse=False, or take ddp")
    owners: dict[nn.Parameter, tuple[str | None, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        first_block, first_name = owners.setdefault(parameter, (block, name))
        if first_block != block and parameter.ndim > 0:
            raise UsageError(
                f"FSDP2Strategy: '{name}' and '{first_name}' are one parameter, of which only one is in a block "
                f"('{block or first_block}'), or both in different ones: name other blocks, such that one holds both"
            )


def refuse_late_parameters(module: nn.Module, scalars: Collection[str]) -> None:
    """Refuse a parameter made after sharding, other than `scalars`: it would stay different on each rank."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) and name not in scalars:
            raise UsageError(
                f"parameter '{name}' was made after sharding: make it in __init__ or configure_model, "
                "where FSDP2Strategy sees it"
            )


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
    own = [f"'{name}', {tuple(value.shape)} of {value.dtype}" for name, value in tensors]
    hashes = on_all_ranks(lambda: hashlib.sha256(repr(own).encode()).digest())
    if len(set(hashes)) == 1:
        return
    built = on_all_ranks(lambda: own)
    rank = next(rank for rank, found in enumerate(hashes) if found != hashes[0])
    pairs = zip_longest(built[rank], built[0], fillvalue="nothing more")
    there, first = next(pair for pair in pairs if pair[0] != pair[1])
    raise UsageError(
        f"rank {rank} has built another module than rank 0: it has {there} in place of {first}: "
        "build the same one on all ranks, tied parameters included"
    )
