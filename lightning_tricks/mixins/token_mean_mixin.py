"""Mean loss over the tokens of a whole optimizer step: over micro-batches and ranks, however ragged their counts."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_tricks.mixins._base import Mixin


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one scalar tensor, without reading it on the host; DTensors shard by shard."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if local:
        torch._foreach_mul_(local, factor)


class TokenMeanMixin(Mixin):
    """Own `on_after_backward`: the step's gradient is that of (sum of nats) / (number of tokens), exactly.

    Lightning averages over micro-batches and the strategy over ranks, which weighs a token of a short micro-batch more
    than one of a long micro-batch. Here each micro-batch contributes its sum over one fixed constant, and the last
    backward pass of the step scales the gradients by constant / tokens. One micro-batch on one device needs no scaling
    and gets the plain mean. For automatic optimization; goes before LightningModule in the bases.
    """

    _capacity: int | None = None
    _step_nats: Tensor | None = None
    _step_tokens: Tensor | None = None
    _step_over = True

    def token_mean(self, nats: Tensor, tokens: Tensor, capacity: int) -> Tensor:
        """What `training_step` returns.

        Args:
            nats: Sum of the losses of the micro-batch's tokens, a scalar.
            tokens: How many tokens that were, an int64 scalar on the same device; may be 0.
            capacity: Upper bound of `tokens`, known without reading the device, such as `labels.numel()`.

        Returns:
            Scalar whose accumulated gradient becomes the mean over all tokens of the step.
        """
        if self._step_over or self._step_nats is None or self._step_tokens is None:
            self._step_nats, self._step_tokens, self._step_over = nats.detach(), tokens, False
        else:
            self._step_nats, self._step_tokens = self._step_nats + nats.detach(), self._step_tokens + tokens
        if self._splits() == 1:
            return nats / tokens.clamp(min=1)
        if self._capacity is None:  # any constant will do, but every rank needs the same one
            self._capacity = self.trainer.strategy.broadcast(capacity)
        return nats / self._capacity

    def step_mean(self) -> Tensor:
        """Mean nats per token of the latest step, over all ranks: every rank must call. Scalar on the device."""
        assert self._step_nats is not None
        return self._over_ranks(self._step_nats) / self._tokens_of_all_ranks()

    def on_after_backward(self) -> None:
        """Scale the gradients after the step's last backward pass, before anyone clips or logs them."""
        super().on_after_backward()
        if self._step_tokens is None or self.trainer.fit_loop._should_accumulate():
            return
        self._step_over = True
        if self._splits() > 1:
            assert self._capacity is not None
            factor = self._capacity * self._splits() / self._tokens_of_all_ranks()
            strategy: Any = self.trainer.strategy
            if hasattr(strategy, "scale_gradients"):  # DeepSpeed's engine holds them
                strategy.scale_gradients(factor)
            else:
                scale_gradients([p.grad for p in self.parameters() if p.grad is not None], factor)

    def _splits(self) -> int:
        return self.trainer.accumulate_grad_batches * self.trainer.world_size

    def _tokens_of_all_ranks(self) -> Tensor:
        assert self._step_tokens is not None
        return self._over_ranks(self._step_tokens).clamp(min=1)

    def _over_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value.clone(), reduce_op="sum")  # it reduces in place
