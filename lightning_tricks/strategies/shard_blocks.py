"""Shard a decoder over a device mesh with FSDP2: each block on its own, then the rest with the root."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_blocks(root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, bf16: bool) -> None:
    """Replace the parameters of `root` by shards over `mesh`, gathered one block at a time.

    Works on meta tensors, so that no device ever holds the whole model; call `to_empty` and the initialisation after.

    Args:
        root: Module that is called forward as a whole.
        blocks: Its repeated blocks, the units of gathering.
        mesh: One-dimensional mesh of the data-parallel ranks.
        bf16: Gather weights in bf16 and reduce gradients in fp32; otherwise both in the weights' own type.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
