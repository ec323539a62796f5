"""Whether one optimizer step is within bounds: its loss and its gradient norm against their limits, on the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce


class Judgement:
    """The loss and the gradient norm of one step of this rank, and which of them are within bounds.

    Args:
        losses: of the step's micro-batches, 0-dim tensors whose sum is the step's loss; none of them: it counts as 0.
        norm: of all gradients before the clip, a 0-dim tensor on any device.
        limits: (2,) largest loss and largest norm, both finite: NaN and infinity are within none.
        scale: by which the losses were multiplied, a 0-dim tensor; None for 1.
        overflows: whether a norm that is not finite is an overflow of fp16, which a scaler or DeepSpeed skips itself.

    Attributes:
        values: (2,) loss and norm, in fp32.
        within: (2,) bool, of each.
        good: 0-dim bool, whether both are.
        finite: 0-dim bool, whether the norm is, where one that is not does not make the step bad; else None.
    """

    def __init__(
        self, losses: Sequence[Tensor], norm: Tensor, limits: Tensor, scale: Tensor | None, overflows: bool
    ) -> None:
        device = limits.device
        self._computed = torch.stack([_fp32(number, device) for number in (*losses, norm)])
        self.values, self.limits = self._computed, limits
        if len(losses) != 1 or scale is not None:
            loss = self._computed[:-1].sum() / (1.0 if scale is None else scale.to(device))
            self.values = torch.stack([loss, self._computed[-1]])
        self.within = self.values <= limits
        self.finite = self.values[1].isfinite() if overflows else None
        if self.finite is not None:
            self.within[1] |= ~self.finite & self.within[0]
        self.good = self.within.all()

    def same_bits(self, other: "Judgement") -> Tensor:
        """Whether another computation of the step gave the same bits of each loss and of the norm: 0-dim bool."""
        return (self._computed.view(torch.int32) == other._computed.view(torch.int32)).all()

    def out_of_bounds(self, rank: int) -> tuple[Tensor, Tensor]:
        """For the report, where the largest value over all ranks shows what was out of bounds on any of them.

        Returns:
            rank + 1, 0-dim, or 0 if the step is within bounds here; (2, 2) values and limits, of which those within
            bounds are -inf, and values that are not finite are inf.
        """
        values = self.values.to(self.limits.dtype).nan_to_num(math.inf, math.inf, math.inf)
        out = torch.where(self.within, -math.inf, torch.stack([values, self.limits]))
        return torch.where(self.good, 0.0, rank + 1.0), out


def _fp32(number: Tensor, device: torch.device) -> Tensor:
    return number if number.dtype == torch.float32 and number.device == device else number.to(device, torch.float32)


def any_rank(flag: Tensor, several: bool) -> Tensor:
    """1.0 if `flag`, a 0-dim bool tensor, holds on any of `several` ranks, else 0.0; every rank must call. No wait."""
    number = flag.float()
    if several:
        all_reduce(number, ReduceOp.MAX)
    return number
