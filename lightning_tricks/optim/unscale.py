"""Divide gradients by the scale of a scaled loss, sharded ones too, with one answer for all ranks."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of `optimizer` by the scale, in place, and note whether one was infinite or NaN on any rank.

    What `scaler.unscale_` does, for DTensors too: torch's asks only the ranks of the first gradient's mesh, and fails
    on plain gradients beside sharded ones. Here each rank looks at its own shards and, where a parameter is sharded,
    all ranks of the world agree, so every rank must call. A second call before the scaler's update does nothing. No
    wait for the device.

    Args:
        scaler: one that has scaled a loss, and is enabled.
        optimizer: its gradients may be of any shapes and on several devices. The answer is where the scaler keeps it,
            as one value on the scale's device.

    Source: `_unscale_grads_` in torch/amp/grad_scaler.py and `found_inf_reduce_handler` in
        torch/distributed/tensor/_dispatch.py of https://github.com/pytorch/pytorch.
    """
    if scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY":
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    owner: Any = SimpleNamespace(param_groups=[{"params": _own_shards(parameters)}]) if sharded else optimizer
    scaler.unscale_(owner)
    state, scale = scaler._per_optimizer_states.pop(id(owner)), scaler._get_scale_async()
    assert scale is not None  # unscale_ has divided by it
    found = torch.zeros_like(scale)
    for of_device in state["found_inf_per_device"].values():
        found += of_device.to(found.device, non_blocking=True)
    if sharded:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    state["found_inf_per_device"] = {found.device: found}
    scaler._per_optimizer_states[id(optimizer)] = state


def _own_shards(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Plain tensors, the `grad` of each being this rank's part of a parameter's gradient, in the same memory."""
    shards = []
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        shard = local.detach()  # stands for the parameter, at which unscaling does not look
        shard.grad = local
        shards.append(shard)
    return shards
