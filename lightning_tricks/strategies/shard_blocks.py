"""Shard a decoder over a device mesh with FSDP2: each block on its own, then the rest with the root."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_blocks(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None
) -> None:
    """Replace the parameters of `root` by shards over `mesh`, gathered one block at a time.

    Works on meta tensors, so that no device ever holds the whole model; call `to_empty` and the initialisation after.

    Args:
        root: Module that is called forward as a whole. Where `policy` casts, what it returns is fp32, as a loss of
            16-bit logits would be good for two or three digits.
        blocks: Its repeated blocks, the units of gathering.
        mesh: One-dimensional mesh of the data-parallel ranks.
        policy: What weights are gathered in and gradients reduced in, such as a precision plugin's `fsdp2_policy`;
            None for the weights' own type.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    policy = policy or MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    output_dtype = policy.output_dtype or (torch.float32 if policy.param_dtype else None)
    fully_shard(root, mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=output_dtype))
