"""Initial weights that do not depend on how many devices share them."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def draw_normal(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill `weight` in place from a normal distribution of mean 0.

    Of a sharded weight every rank draws the whole and keeps its part, so the values are those of one device. Left to
    itself, torch gives each rank of a CPU mesh the same numbers for its shard.

    Args:
        weight: any shape, a DTensor too; gradients must be off.
        std: standard deviation.
        generator: source of randomness on the weight's device, in the same state on every rank. Default: torch's.
    """
    if not isinstance(weight, DTensor):
        weight.normal_(0.0, std, generator=generator)
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).normal_(0.0, std, generator=generator)
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))
