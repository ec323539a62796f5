"""Unscale the gradients of a scaled loss, also sharded ones. Only this file reads private state of torch's GradScaler.

Read from torch/amp/grad_scaler.py (torch 2.13): `_per_optimizer_states` holds the stage of each optimizer and whether
it found an overflow; `_get_scale_async` returns the scale without a wait for the device.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import local, where_read


def loss_scale(scaler: GradScaler) -> Tensor | None:
    """The scale, a 0-dim tensor into which the scaler writes the next scale; None before the first loss. No wait."""
    return scaler._get_scale_async()


def is_scaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether the gradients of `optimizer` still carry the scale: nobody unscaled them since the scaler's update."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"


def refuse_scaled(scaler: GradScaler | None, optimizer: Optimizer, who: str, precision: Any) -> None:
    """Refuse an optimizer whose gradients the scaler has not unscaled: Lightning lets a fused one do it in its step."""
    if scaler is not None and is_scaled(scaler, optimizer):
        raise UsageError(
            f"{who}: fused {type(optimizer).__name__} under fp16 (trainer.precision={precision}) unscales in its own "
            "step: set plugins to FP16Mixed instead of the precision, set fused to false, or train in bf16"
        )


def has_overflowed(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether `unscale` found an infinite or NaN gradient, on any rank. One read of the device."""
    return any(bool(found) for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def add_overflow(scaler: GradScaler, optimizer: Optimizer, found: Tensor) -> None:
    """Let the scaler treat the next step of `optimizer` as an overflow if `found`, a 0-dim tensor, is 1.

    Call it after `unscale`. No wait for the device.
    """
    for of_device in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        of_device.copy_(of_device.maximum(found.to(of_device.device)))


def drop_unfinished(scaler: GradScaler) -> None:
    """Forget the optimizers whose step an exception has cut short: a scaler that knows one cannot be pickled."""
    scaler._per_optimizer_states.clear()


@torch.no_grad()
def unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Divide the gradients of `optimizer` by the scale, in place, and note whether one was infinite or NaN on any rank.

    The same as `scaler.unscale_`, for DTensors too: torch's method asks only the ranks of the first gradient's mesh,
    and fails on plain gradients beside sharded ones. Here each rank looks at its own shards and, if any parameter is
    sharded, all ranks agree, so every rank must call. Idempotent until the scaler's update. No wait for the
    device, except for gradients on the host.

    Args:
        scaler: has scaled a loss, and is enabled.
        optimizer: of gradients on any devices. The scaler keeps the answer, as one value on the scale's device.

    Source: `_unscale_grads_` in torch/amp/grad_scaler.py and `found_inf_reduce_handler` in
        torch/distributed/tensor/_dispatch.py of https://github.com/pytorch/pytorch.
    """
    if not is_scaled(scaler, optimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    owner: Any = SimpleNamespace(param_groups=[{"params": _own_shards(parameters)}]) if sharded else optimizer
    scale = loss_scale(scaler)
    assert scale is not None  # it has scaled a loss
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with replaced(scaler, "_scale", where_read(scale, gradients)):  # torch copies it to the host without a wait
        scaler.unscale_(owner)
    state = scaler._per_optimizer_states.pop(id(owner))
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
        shard = local(gradient).detach()  # stands for the parameter, whose values unscaling does not read
        shard.grad = local(gradient)
        shards.append(shard)
    return shards
