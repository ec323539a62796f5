"""Round fp32 to bf16 up or down at random, without bias: an update far below a bf16 spacing is not lost."""

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_CHUNK = 1 << 24  # elements rounded at once: 128 MiB for their random bits and the rounded values


def round_to_bf16(source: Tensor, generator: torch.Generator) -> Tensor:
    """The bf16 neighbour above or below each value, the nearer one more often: the mean of many roundings is the value.

    bf16 is the upper half of fp32's bits, so a random 16-bit integer added to the lower half carries into the upper
    half with the right probability. A value that bf16 can represent does not change, nor do infinities and NaN; a
    finite value becomes infinite only above bf16's largest, 3.39e38.

    Args:
        source: fp32, any shape.
        generator: on the device of `source`; the random state of the model is not touched.

    Returns:
        bf16, shape of `source`.

    Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192.
    """
    bits = torch.empty_like(source, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    bits.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    # with a carry, a NaN's bits may come out as any number
    return torch.where(source.isfinite(), bits.view(torch.float32), source).bfloat16()


def copy_rounded_(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Write `source` (fp32) into `target` (bf16, same shape) by `round_to_bf16`, with little memory beside them."""
    if target.is_contiguous() and source.is_contiguous():
        pieces = zip(target.view(-1).split(_CHUNK), source.view(-1).split(_CHUNK), strict=True)
    else:
        pieces = zip([target], [source], strict=True)
    for to, value in pieces:
        to.copy_(round_to_bf16(value, generator))


def rounding_seed(seed: int, step: int, index: int, param: Tensor) -> int:
    """A seed for one parameter at one step: equal on ranks that hold the same shard of it, different on the others.

    Args:
        seed: of the run; equal on all ranks.
        step: number of the optimizer's step.
        index: of the parameter in its optimizer.
        param: the parameter. For a DTensor, the rank's coordinates on the mesh dimensions that split it count too.
    """
    shard: list[int] = []
    if isinstance(param, DTensor):
        coordinates = param.device_mesh.get_coordinate() or ()
        pairs = zip(coordinates, param.placements, strict=False)
        shard = [coordinate for coordinate, placement in pairs if not placement.is_replicate()]
    text = repr((seed, step, index, shard))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
