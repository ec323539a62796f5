"""Whether one optimizer step is within bounds: its loss and its gradient norm against their limits, on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce


class Judgement:
    """The loss and the gradient norm of one step of this rank, and whether they are within bounds.

    Args:
        losses: of the step's micro-batches, 0-dim tensors whose sum is the step's loss; none of them: it counts as 0.
        norm: of all gradients before the clip, a 0-dim tensor on any device.
        limits: (2,) largest loss and largest norm.
        scale: by which the losses were multiplied, a 0-dim tensor; None for 1.
        overflows: whether a norm that is not finite is an overflow of fp16, which a scaler skips by itself.

    Attributes:
        values: (2,) loss and norm, in fp32.
        within: 0-dim bool.
    """

    def __init__(
        self, losses: Sequence[Tensor], norm: Tensor, limits: Tensor, scale: Tensor | None, overflows: bool
    ) -> None:
        device = limits.device
        self._computed = torch.stack([number.to(device, torch.float32) for number in (*losses, norm)])
        loss = self._computed[:-1].sum()
        if scale is not None:
            loss = loss / scale.to(device)
        self.values, self.limits = torch.stack([loss, self._computed[-1]]), limits
        self._fine = self.values.isfinite() & (self.values <= limits)
        if overflows:
            self._fine[1] |= ~self.values[1].isfinite() & loss.isfinite()
        self.within = self._fine.all()

    def same_bits(self, other: "Judgement") -> Tensor:
        """Whether another computation of the step gave the same bits of each loss and of the norm: 0-dim bool."""
        return (self._computed.view(torch.int32) == other._computed.view(torch.int32)).all()

    def numbers(self, rank: int) -> Tensor:
        """For the report: rank + 1, loss, its limit, norm, its limit; -inf for what is within bounds, inf for NaN."""
        values = self.values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        pairs = torch.stack([values, self.limits], dim=1)
        named = torch.where(self.within, 0.0, rank + 1.0).unsqueeze(0)
        return torch.cat([named, torch.where(self._fine.unsqueeze(1), -torch.inf, pairs).flatten()])


def any_rank(trainer: Any, flag: Tensor) -> Tensor:
    """1.0 if `flag`, a 0-dim bool tensor, holds on any rank, else 0.0; every rank must call. No wait on a GPU."""
    number = flag.float()
    if trainer.world_size > 1:
        all_reduce(number, ReduceOp.MAX)
    return number
