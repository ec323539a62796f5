"""What rounding to fp8 does to a tensor: its largest magnitude, and the share of it that is lost. Torch only."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_TINY = 1e-12  # torchao's floor for a largest magnitude


def stats_of(name: str, values: Tensor, scale: Tensor | None, recipe: str) -> dict[str, Tensor]:
    """`{name}_amax`, the largest magnitude, and `{name}_underflow`, the share of the nonzero elements that become zero.

    Args:
        name: what the tensor is.
        values: (..., in_features); empty ones, as of a rank that has no rows of a weight, give zeros.
        scale: what they are multiplied by before rounding; None for the recipe's own.
        recipe: see `e4m3_scale`.

    Returns:
        0-dim fp32 tensors on the device of `values`.
    """
    if values.numel() == 0:
        return {f"{name}_amax": values.new_zeros((), dtype=torch.float32), f"{name}_underflow": values.new_zeros(())}
    scale = e4m3_scale(values, recipe) if scale is None else scale
    return {f"{name}_amax": values.float().abs().amax(), f"{name}_underflow": underflow(values, scale)}


def weight_and_scale(weight: Any, shard: Any, recipe: str) -> tuple[Tensor, Tensor | None]:
    """The elements of a weight that this rank has, and their scale where it is not that of these elements alone.

    Args:
        weight: the layer's weight as it is now: plain, a shard, or gathered by FSDP2 in bf16 or in fp8.
        shard: the same weight's shard, for one that is gathered in fp8.
        recipe: see `e4m3_scale`. The one scale of `tensorwise` is the whole weight's: every rank must call.
    """
    if not isinstance(weight, DTensor) and not hasattr(weight, "_scale"):
        return weight, None
    sharded: Any = shard if hasattr(weight, "_scale") else weight
    local = sharded._local_tensor
    values = getattr(local, "_tensor", local)
    if hasattr(weight, "_scale"):
        return values, weight._scale
    if recipe == "tensorwise":
        return values, e4m3_scale(sharded.detach().abs().amax().full_tensor(), recipe)
    return values, None


def e4m3_scale(values: Tensor, recipe: str) -> Tensor:
    """What `recipe` multiplies `values` by before they are rounded to E4M3 in a product's forward pass.

    Args:
        values: (..., in_features): a layer's input or weight.
        recipe: `tensorwise`: one scale, which brings the largest magnitude to 448. `rowwise` and `rowwise_with_gw_hp`:
            one for each row, rounded down to a power of two. `mxfp8`: such a one for each 32 elements of a row.

    Returns:
        fp32, of a shape that multiplies `values`.
    """
    magnitude = values.float().abs()
    if recipe == "tensorwise":
        return _MAX / magnitude.amax().clamp(min=_TINY)
    if recipe == "mxfp8":
        amax = magnitude.unflatten(-1, (-1, 32)).amax(-1)
        return _power_of_two_below(_MAX / amax.clamp(min=_TINY)).repeat_interleave(32, -1)
    return _power_of_two_below(_MAX / magnitude.amax(-1, keepdim=True).clamp(min=_TINY))


def underflow(values: Tensor, scale: Tensor) -> Tensor:
    """The share of the nonzero elements of `values` that are zero in E4M3; 0 where there is none. A 0-dim tensor."""
    nonzero = values != 0
    rounded = (values.float() * scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
    lost = nonzero & (rounded.float() == 0)
    return lost.sum().float() / nonzero.sum().clamp(min=1)


def _power_of_two_below(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)
