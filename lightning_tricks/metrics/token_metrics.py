"""Loss, perplexity and bits/byte of a whole validation set: exact sums over batches and ranks, divided at the end."""

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._core.tensors import widest

__all__ = ["BitsPerByte", "TokenLoss", "TokenPerplexity"]


def add(total: Tensor, value: Tensor) -> Tensor:
    """Add a scalar of any floating type to a sum that is held as two numbers: the rounded sum, and its rounding error.

    Nothing is read on the host. Two fp32 numbers hold 48 bits, so a billion additions keep the first ten digits.

    Returns:
        The new sum, (2,), of the type and on the device of `total`.

    Source: `TwoSum` and `FastTwoSum` in Shewchuk 1997, https://doi.org/10.1007/PL00009321.
    """
    rounded = value.to(total.dtype)
    remainder = (value - rounded.to(value.dtype)).to(total)  # of a float64; else 0
    rounded = rounded.to(total.device)
    old, left = total.unbind()
    sum_ = old + rounded
    taken = sum_ - old
    left = left + remainder + ((old - (sum_ - taken)) + (rounded - taken))
    new = sum_ + left
    # infinity and NaN leave no remainder
    return torch.where(new.isfinite(), torch.stack([new, left - (new - sum_)]), torch.stack([sum_, sum_.new_zeros(())]))


def add_all(totals: Tensor) -> Tensor:
    """Add n sums, (n, 2) to (2,): torchmetrics joins the sums of all ranks by it."""
    total = totals[0]
    for rounded, left in totals[1:]:
        total = add(add(total, rounded), left)
    return total


class SumRatio(Metric):
    """Nats over an exact count, both summed over all batches since `reset` and all ranks; NaN if the count is 0."""

    full_state_update = False
    is_differentiable = False
    higher_is_better = False
    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros(2), dist_reduce_fx=add_all)
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = ()) -> Self:
        """Move the sums with the module to another device, but not to another dtype or to meta: they would be wrong."""
        super()._apply(fn, exclude_state=["nats", "count"])
        if self.device.type != "meta":
            for name in ("nats", "count"):
                self._defaults[name] = torch.as_tensor(self._defaults[name], device=self.device)
                setattr(self, name, getattr(self, name).to(self.device))
        return self

    def add_batch(self, nats: Tensor | float, count: Tensor | int) -> None:
        """Add a batch's sum and its count: scalars, or one number a row."""
        if not isinstance(nats, Tensor):
            nats = torch.tensor(nats, dtype=torch.float64)
        self.nats = add(self.nats, nats.detach().sum())
        self.count = self.count + torch.as_tensor(count).sum()

    def ratio(self) -> Tensor:
        """Sum over count as a scalar on the metric's device, in its `widest` type."""
        return self.nats.to(widest(self.nats.device)).sum() / self.count


class TokenLoss(SumRatio):
    """Nats per token: the sum of all tokens' losses over the number of tokens, over all batches and all ranks.

    Not the mean of the batches' means, which weighs a token of a short batch more than one of a long batch. Equal to
    sums in float64 to 1e-13; on Apple's GPUs right to 1e-6, also after a billion tokens. NaN without any token.

    Example:
        >>> loss = TokenLoss()
        >>> loss.update(nats=6.0, tokens=2)
        >>> loss.update(nats=2.0, tokens=2)
        >>> loss.compute().item()
        2.0
    """

    def update(self, nats: Tensor | float, tokens: Tensor | int) -> None:
        """Add a batch.

        Args:
            nats: sum of the losses of its tokens, `cross_entropy(..., reduction="sum")`; a scalar or one a row.
            tokens: number of those tokens; a scalar or one a row.
        """
        self.add_batch(nats, tokens)

    def compute(self) -> Tensor:
        """Nats per token, a scalar."""
        return self.ratio()


class TokenPerplexity(TokenLoss):
    """Exponential of the mean loss over all tokens, batches and ranks: 1 for a model that is always right.

    Example:
        >>> perplexity = TokenPerplexity()
        >>> perplexity.update(nats=0.0, tokens=3)
        >>> perplexity.compute().item()
        1.0
    """

    def compute(self) -> Tensor:
        """Perplexity, a scalar."""
        return self.ratio().exp()


class BitsPerByte(SumRatio):
    """Nats of all tokens over ln 2 times the bytes of text that they stand for, over all batches and all ranks.

    Comparable between models of different tokenizers, and with compressors: 8 is no model at all. Leave tokens out that
    stand for no text, such as end-of-text. As exact as `TokenLoss`. NaN without any byte.

    Example:
        >>> bits_per_byte = BitsPerByte()
        >>> bits_per_byte.update(nats=16 * math.log(2), n_bytes=8)
        >>> round(bits_per_byte.compute().item(), 9)
        2.0

    Source: `evaluate_bpb` in https://github.com/karpathy/nanochat/blob/master/nanochat/loss_eval.py.
    """

    def update(self, nats: Tensor | float, n_bytes: Tensor | int) -> None:
        """Add a batch.

        Args:
            nats: sum of the losses of its tokens; a scalar or one a row.
            n_bytes: UTF-8 bytes that those tokens stand for; a scalar or one a row.
        """
        self.add_batch(nats, n_bytes)

    def compute(self) -> Tensor:
        """Bits per byte, a scalar."""
        return self.ratio() / math.log(2)
