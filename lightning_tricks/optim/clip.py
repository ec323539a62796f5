"""Clip gradients by their norm, and keep that norm: one pass, no wait for the GPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale the gradients of `parameters` in place so that their joint L2 norm is at most `max_norm`.

    The same arithmetic as `torch.nn.utils.clip_grad_norm_`. Plain tensors and DTensors, of several meshes too, may come
    together: shards are summed across ranks, so every rank must call. A norm that is infinite or NaN makes every
    clipped gradient 0 or NaN, as in torch.

    Args:
        parameters: of any shapes; those without a gradient count for nothing.
        max_norm: the largest norm allowed, above 0; None to measure only. Usual: 1.0.

    Returns:
        The norm before clipping, a 0-dim tensor on the gradients' device; 0 where there are none.

    Raises:
        UsageError: max_norm is 0, negative or NaN.

    Source: Pascanu et al. 2012, https://arxiv.org/abs/1211.5063; 1.0: Touvron et al. 2023,
        https://arxiv.org/abs/2302.13971.
    """
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"gradient_clip_val={max_norm!r}: give a number above 0, or none to measure only")
    parameters = list(parameters)
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_grad:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    groups = _by_mesh(with_grad)
    norms = [_full(torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    total = norms[0]
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]))
    if max_norm is not None:
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    # torch refuses an operation on tensors of different meshes, or on plain ones beside DTensors
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
