"""Shard any module with FSDP2: its blocks one by one, then what is left with the root."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


class HowToShard(NamedTuple):
    """What `fully_shard` is told.

    Attributes:
        mesh: one dimension to shard over, or two: replicate over the first and shard over the second.
        policy: types that weights are gathered and gradients reduced in.
        reshard_after_forward: whether a block's weights are dropped after its forward pass and gathered again in the
            backward pass; those of the root never are.
        offload: where the shards rest.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    offload: OffloadPolicy


def shard_module(root: nn.Module, blocks: Collection[nn.Module], how: HowToShard) -> None:
    """Replace all parameters of `root` by shards, gathered a block at a time.

    Values stay what they are on this rank, so they must be equal on all; meta tensors stay meta.

    The root takes its inputs as they come: they are a batch, whose floats may be targets. Modules with running
    statistics (batch norm) keep their own type, as the statistics do.

    Args:
        root: any module; its forward, or what is registered as such, gathers what belongs to no block.
        blocks: submodules, the units of gathering, in the order of `root.modules()`.
        how: see `HowToShard`.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    options: dict[str, Any] = {"mesh": how.mesh, "offload_policy": how.offload}
    if how.policy.param_dtype is not None:
        for module in root.modules():
            if getattr(module, "running_mean", None) is not None and next(module.parameters(), None) is not None:
                fully_shard(module, reshard_after_forward=False, **options)
    for block in reversed(dict.fromkeys(blocks)):  # blocks inside others first, as `fully_shard` wants it
        if not isinstance(block, FSDPModule):
            fully_shard(block, mp_policy=how.policy, reshard_after_forward=how.reshard_after_forward, **options)
    as_they_come = dataclasses.replace(how.policy, cast_forward_inputs=False)
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
    return sum(local(parameter).numel() * parameter.element_size() for parameter in module.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard; of a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
