"""Whether one optimizer step is within bounds: its loss and its gradient norm against their limits, on the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce


class Judgement:
    """The loss and the gradient norm of one step of this rank, and which of them are out of bounds.

    Args:
        losses: of the step's micro-batches, 0-dim tensors whose sum is the step's loss; none of them: it counts as 0.
        norm: of all gradients before the clip, a 0-dim tensor on any device.
        limits: (2,) largest loss and largest norm, both finite.
        scale: by which the losses were multiplied, a 0-dim tensor; None for 1.
        overflows: whether a norm that is not finite is an overflow of fp16, which a scaler or DeepSpeed skips itself.

    Attributes:
        values: (2,) loss and norm, in the dtype of the limits; infinite where they are not finite.
        over: (2,) bool, whether each is out of bounds.
        rejected: 0-dim bool, whether any is.
        overflow: 0-dim bool, whether the norm is not finite, where that is an overflow; else None.
    """

    def __init__(
        self, losses: Sequence[Tensor], norm: Tensor, limits: Tensor, scale: Tensor | None, overflows: bool
    ) -> None:
        device = limits.device
        values = self._computed = torch.stack([number.to(device, torch.float32) for number in (*losses, norm)])
        if len(losses) != 1 or scale is not None:
            loss = values[:-1].sum() / (1.0 if scale is None else scale.to(device))
            values = torch.stack([loss, values[-1]])
        self.values, self.limits = values.to(limits.dtype).nan_to_num(math.inf, math.inf, math.inf), limits
        self.over = self.values > limits
        self.overflow = self.values[1] == math.inf if overflows else None
        if self.overflow is not None:
            self.over[1] &= ~self.overflow | self.over[0]
        self.rejected = self.over.any()

    def same_bits(self, other: "Judgement") -> Tensor:
        """Whether another computation of the step gave the same bits of each loss and of the norm: 0-dim bool."""
        return (self._computed.view(torch.int32) == other._computed.view(torch.int32)).all()

    def numbers(self) -> Tensor:
        """For the report, where the largest value over all ranks shows what was out of bounds on any of them.

        Returns:
            (2, 2) loss and norm, and below them their limits; -inf in the place of what is within bounds.
        """
        return torch.where(self.over, torch.stack([self.values, self.limits]), -math.inf)


def any_rank(trainer: Any, flag: Tensor) -> Tensor:
    """1.0 if `flag`, a 0-dim bool tensor, holds on any rank, else 0.0; every rank must call. No wait on a GPU."""
    number = flag.float()
    if trainer.world_size > 1:
        all_reduce(number, ReduceOp.MAX)
    return number
