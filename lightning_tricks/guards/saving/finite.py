"""Whether all weights are finite numbers, decided on their device: one tensor to read for all of them."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_tricks._tensors import local


def not_finite(parameters: Iterable[Tensor]) -> Tensor:
    """1.0 where one of this process's weights is NaN or infinite, else 0.0; shape (), on the device of the weights.

    Of a DTensor or of a weight that DeepSpeed has partitioned, the part on this rank counts; add the values of all
    ranks. Buffers do not count: masks hold infinities.
    """
    # the largest absolute value: a norm that cannot overflow where no weight is infinite, and that is NaN if one is NaN
    norm = get_total_norm(_parts(parameters), norm_type=float("inf"))
    return 1.0 - norm.isfinite().float()


@torch.no_grad()
def _parts(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The numbers of weights on this rank, each as a real tensor that has a norm."""
    parts = []
    for parameter in parameters:
        part = local(getattr(parameter, "ds_tensor", parameter)).detach()
        if part.is_sparse:
            part = part.coalesce().values()
        if part.is_complex():
            part = torch.view_as_real(part)
        if not part.is_floating_point() or part.numel() == 0:
            continue
        parts.append(part.float() if part.itemsize == 1 else part)
    return parts
