"""Turn any module into shards with FSDP2: its blocks one by one, then the rest with the root.

All ranks start with rank 0's values. A module may come with values on each rank, with values on rank 0 alone, or with
none (parameters on the meta device).
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_tricks._errors import UsageError
from lightning_tricks._tensors import local
from lightning_tricks._trainer import is_a
from lightning_tricks.optim.limits import refuse_limits
from lightning_tricks.strategies.broadcast import broadcast


def shard_module(
    root: nn.Module,
    blocks: Collection[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool,
) -> None:
    """Replace all parameters of `root` by shards, which are gathered one block at a time.

    Values stay what they are on this rank, so they must be equal on all; meta tensors stay meta.

    The root takes its inputs as they come: they are a batch, whose floats may be targets. Modules with running
    statistics (batch norm) keep their own type, as the statistics do.

    Args:
        root: any module; its forward, or a method that is registered as such, gathers the parameters of no block.
        blocks: submodules, the units of gathering, in the order of `root.modules()`.
        mesh: one dimension to shard over, or two: replicate over the first and shard over the second.
        policy: types in which weights are gathered and gradients reduced.
        offload: where the shards lie between the steps.
        reshard_after_forward: whether a block's weights are dropped after its forward pass and gathered again in the
            backward pass; those of the root never are.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    if policy.param_dtype is not None:
        for module in root.modules():
            if getattr(module, "running_mean", None) is not None and next(module.parameters(), None) is not None:
                fully_shard(module, reshard_after_forward=False, **options)
    for block in reversed(dict.fromkeys(blocks)):  # blocks inside others first, as `fully_shard` wants it
        if not isinstance(block, FSDPModule):
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
    as_they_come = dataclasses.replace(policy, cast_forward_inputs=False)
    fully_shard(root, mp_policy=as_they_come, reshard_after_forward=False, **options)


def largest_group(root: nn.Module, blocks: Collection[nn.Module]) -> int:
    """Elements of the largest of the groups whose parameters `shard_module` gathers together."""
    sizes: list[int] = []
    taken: set[nn.Parameter] = set()
    for part in [*reversed(dict.fromkeys(blocks)), root]:  # blocks inside others first
        own = set(part.parameters()) - taken
        sizes.append(sum(parameter.numel() for parameter in own))
        taken |= own
    return max(sizes)


def local_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


def summary(mesh: DeviceMesh, blocks: Mapping[str, nn.Module], elements: int, gathered: int, module: nn.Module) -> str:
    """The lines that tell how `module` was sharded; `elements` in all, at most `gathered` of them at a time."""
    names = list(blocks)
    few = names if len(names) < 3 else [names[0], "...", names[-1]]
    return "\n".join(
        [
            f"FSDP2 on replicate {mesh.shape[0]} x shard {mesh.shape[1]}",
            f"  blocks      {len(names):,}: {', '.join(few)}" if names else "  blocks      none",
            f"  parameters  {elements:,}, of which at most {gathered / max(elements, 1):.1%} are gathered at a time",
            f"  on rank 0   {local_bytes(module) / 2**20:,.2f} MiB of weights",
        ]
    )


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
            module.to("meta")

    def scatter(self, module: nn.Module, device: torch.device) -> None:
        """Fill the sharded `module`, which is meta, on every rank; every rank must call."""
        module.to_empty(device=device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, self.state, options=options)
        persistent = module.state_dict().keys()
        others = {name: buffer for name, buffer in module.named_buffers() if name not in persistent}
        for name, buffer in others.items():
            buffer.copy_(self.buffers.get(name, buffer))
        broadcast(others.values(), device)


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


def refuse_fsdp1(module: nn.Module) -> None:
    """Refuse a module that FSDP1 has flattened parts of."""
    if any(is_a(part, "FullyShardedDataParallel") for part in module.modules()):
        raise UsageError(
            f"{type(module).__name__} wraps parts of itself in FullyShardedDataParallel (FSDP1): "
            "leave the sharding to FSDP2Strategy"
        )


def refuse_optimizers(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that take no DTensors."""
    for optimizer in optimizers:
        refuse_limits(optimizer, "shards")


def refuse_late_parameters(module: nn.Module) -> None:
    """Refuse a parameter that was made after sharding, which would stay different on each rank."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UsageError(
                f"parameter '{name}' was made after sharding: make it in __init__ or configure_model, "
                "where FSDP2Strategy sees it"
            )
