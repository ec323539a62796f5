"""Clip gradients by their norm, and keep that norm: one pass, no wait for the GPU."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import OverStages

__all__ = ["clip_grad_norm"]

_HALF = (torch.bfloat16, torch.float16)
_DTYPE_IS_TAKEN_FOR_DIM = torch.__version__ >= "2.14"  # of torch._foreach_norm on DTensors; tried with 2.13 and 2.14.1


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None, *, scale_as_torch: bool = False) -> Tensor:
    """Scale the gradients of `parameters` in place so that their joint L2 norm is at most `max_norm`.

    The same arithmetic as `torch.nn.utils.clip_grad_norm_`, but for bf16 and fp16 gradients: their norm is computed and
    kept in fp32, where torch rounds it to their dtype. torch's function refuses to mix plain tensors and DTensors of
    several meshes; this one does not. Shards are summed across ranks, so every rank must call. If the norm is infinite
    or NaN, clipped gradients become 0 or NaN, as in torch.

    Args:
        parameters: of any shapes; parameters without a gradient are ignored.
        max_norm: the largest norm allowed, above 0; None to measure only. Usual: 1.0.
        scale_as_torch: scale bf16 and fp16 gradients by torch's rounded norm, for who stands in for torch's clip.

    Returns:
        The norm before clipping, a 0-dim tensor on the gradients' device, at least in fp32; 0 without any gradient.

    Raises:
        UsageError: max_norm is 0, negative or NaN; a gradient is sparse.

    Source: Pascanu et al. 2012, https://arxiv.org/abs/1211.5063; 1.0: Touvron et al. 2023,
        https://arxiv.org/abs/2302.13971.
    """
    _check_limit(max_norm)
    parameters = list(parameters)
    stages = _over_stages(parameters[0]).group if parameters else None
    with_grad = _with_gradient(parameters)
    if not with_grad and stages is None:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    meshes = _by_mesh(with_grad)
    counted = meshes if stages is None else _by_mesh([each for each in with_grad if _over_stages(each).counts])
    are_rounded = any(parameter.grad.dtype in _HALF for parameter in with_grad)  # type: ignore[union-attr]
    norm = _joint_norm(counted, _norm_in_fp32 if are_rounded else torch.nn.utils.get_total_norm)
    if stages is not None:
        norm = _joined(norm.to(parameters[0].device), stages)
    if max_norm is not None:
        scaling = norm
        if are_rounded and scale_as_torch and stages is None:
            scaling = _joint_norm(meshes, torch.nn.utils.get_total_norm)
        for group in meshes:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, scaling)
    return norm


def clip_parameters_by_norm(optimizer: Any, clip_val: float) -> None:
    """`Precision.clip_grad_by_norm` for parameters of all kinds: `clip_grad_norm` over those of an optimizer."""
    clip_grad_norm([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_val)


def _over_stages(parameter: Tensor) -> OverStages:
    return getattr(parameter, "over_stages", OverStages(None, True))


def _joined(norm: Tensor, group: Any) -> Tensor:
    """The norm of all stages."""
    square = norm.float().square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def _joint_norm(meshes: Sequence[Sequence[Tensor]], norm_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
    norms = [_full(norm_of(_gradients(group))) for group in meshes] or [torch.zeros(())]
    norm = norms[0]
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack([other.to(norm.device) for other in norms]))
    return norm


def _norm_in_fp32(tensors: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(_norms(tensors))


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Limit each number in the gradients of `parameters` to -`clip_value` and `clip_value`, in place.

    The same as `torch.nn.utils.clip_grad_value_`, for all gradients that `clip_grad_norm` takes.

    Args:
        parameters: of any shapes; parameters without a gradient are ignored.
        clip_value: the largest absolute value allowed, above 0.

    Raises:
        UsageError: clip_value is 0, negative or NaN; a gradient is sparse or complex.
    """
    _check_limit(clip_value)
    with_grad = _with_gradient(parameters)
    if any(parameter.is_complex() for parameter in with_grad):
        raise UsageError("gradient_clip_algorithm='value': a gradient is complex, and has no order: clip by norm")
    for group in _by_mesh(with_grad):
        torch.nn.utils.clip_grad_value_(group, clip_value)


@torch.no_grad()
def grad_norms_of(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """L2 norm of the gradients of each part of a model, with one pass over all of them.

    Args:
        parts: parameters of each of n parts; parameters without a gradient are ignored. DTensor shards are summed
            across ranks, so every rank must call. Of pipeline stages: the parts of the whole model, of which some are
            empty here.

    Returns:
        (n,) fp32 tensor; 0 for a part without gradients.
    """
    part_of = {id(p): number for number, part in enumerate(parts) for p in part if p.grad is not None}
    everything = list(chain.from_iterable(parts))
    stages = _over_stages(everything[0]).group if everything else None
    with_grad = [each for each in _with_gradient(everything) if _over_stages(each).counts]
    if not with_grad and stages is None:
        return torch.zeros(len(parts))
    device = everything[0].device
    squares = torch.zeros(len(parts), device=device)
    for group in _by_mesh(with_grad):
        norms = _norms(_gradients(group)).float()
        index = torch.tensor([part_of[id(p)] for p in group]).to(device, non_blocking=True)
        squares.index_add_(0, index, _full(norms).to(device).square())
    if stages is not None:
        dist.all_reduce(squares, group=stages)
    return squares.sqrt()


def _check_limit(limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise UsageError(f"gradient_clip_val={limit!r}: give a number above 0, or none")


def _with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in _gradients(with_grad)):
        raise UsageError(
            "gradient_clip_val, GradNormMonitor, StepGuard: a gradient is sparse, whose norm is not measured: set "
            "sparse=False in the nn.Embedding, or leave them out"
        )
    return with_grad


def _gradients(parameters: Sequence[Tensor]) -> list[Any]:
    return [parameter.grad for parameter in parameters]


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor on the first one's device: (n,), in fp32 for numbers of half precision."""
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        own = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.float32 if dtype in _HALF else None
        same = [tensors[index] for index in own]
        if wide is not None and _DTYPE_IS_TAKEN_FOR_DIM and hasattr(same[0], "device_mesh"):
            norms |= {index: torch.linalg.vector_norm(tensors[index], dtype=wide) for index in own}
        else:
            norms |= zip(own, torch._foreach_norm(same, dtype=wide), strict=True)
    return torch.stack([norms[index].to(tensors[0].device) for index in range(len(tensors))])


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    # torch refuses an operation on tensors of different meshes, or on plain ones beside DTensors
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
