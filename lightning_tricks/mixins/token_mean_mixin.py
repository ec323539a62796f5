"""Mean loss over all tokens of an optimizer step, although micro-batches and ranks have different numbers of them."""

from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local, where_read
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.refusals import Refusal
from lightning_tricks._trainer.run_facts import loss_ranks, weights_layout
from lightning_tricks.mixins._base import Mixin

__all__ = ["TokenMeanMixin"]

_REFUSED = Refusal(
    ("foreign engine",),
    "{strategy} leaves the gradients to DeepSpeed's engine, where nobody can scale them: take DeepSpeedZeROStrategy",
)


class TokenMeanMixin(Mixin):
    """Own `on_after_backward`: the step's gradient is that of (sum of nats) / (number of tokens), exactly.

    Lightning averages over micro-batches and the strategy over ranks, so that a token of a short micro-batch counts
    more than one of a long micro-batch. Here the loss of each micro-batch is its sum divided by one fixed constant, and
    after the last backward pass of the step the gradients are multiplied by constant / tokens. One micro-batch on one
    device needs no scaling and gets the plain mean. The sums are cleared with the gradients, so an unfinished step does
    not change the next one. For automatic optimization; put it before LightningModule in the bases.
    """

    _capacity: int | None = None
    _batch_sums: tuple[Tensor, Tensor] | None = None  # nats and tokens of a micro-batch before its backward pass
    _step_sums: tuple[Tensor, Tensor] | None = None  # of the micro-batches whose gradients are accumulated
    _scaled = True  # whether the accumulated gradients are those of the mean already

    def on_fit_start(self) -> None:
        """Reset the state of an earlier fit of the same module."""
        super().on_fit_start()
        self._capacity = self._batch_sums = self._step_sums = None
        self._scaled = True

    @property
    def loss_sums(self) -> tuple[Tensor, Tensor] | None:
        """Nats and tokens of the micro-batch whose backward pass comes next: what counts in the loss of the step."""
        return self._batch_sums

    def token_mean(self, nats: Tensor, tokens: Tensor, capacity: int) -> Tensor:
        """The loss for `training_step` to return; call it once in each.

        Args:
            nats: Sum of the losses of the micro-batch's tokens, a scalar.
            tokens: Number of these tokens, an int64 scalar on the same device; may be 0.
            capacity: Upper bound of `tokens`, known without reading the device, such as `labels.numel()`.

        Returns:
            Scalar whose accumulated gradient becomes the mean over all tokens of the step.

        Raises:
            UsageError: manual optimization with several micro-batches or ranks: nobody says where a step begins.
        """
        self._batch_sums = nats.detach(), tokens
        if self._splits() == 1:
            return nats / tokens.clamp(min=1)
        if not self.automatic_optimization:
            raise UsageError(
                f"{type(self).__name__}.automatic_optimization=False: token_mean cannot tell where a step of "
                f"{self._splits()} micro-batches begins: return the mean loss of the micro-batch yourself"
            )
        if self._capacity is None:  # any constant works, if every rank has the same one
            self._capacity = self.trainer.strategy.broadcast(capacity)
        return nats / self._capacity

    def step_mean(self) -> Tensor:
        """Mean nats per token of the latest step, over all ranks: every rank must call. Scalar on the device."""
        assert self._step_sums is not None
        nats, tokens = self._step_sums
        return self._over_ranks(nats) / self._over_ranks(tokens).clamp(min=1)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the sums with the gradients: after a step's first forward pass and before its first backward pass."""
        super().on_before_zero_grad(optimizer)
        self._step_sums, self._scaled = None, True

    def on_after_backward(self) -> None:
        """Scale the gradients after the step's last backward pass, before anyone clips or logs them."""
        super().on_after_backward()
        if self._batch_sums is None:
            return
        (nats, tokens), self._batch_sums = self._batch_sums, None
        if self._step_sums is not None:
            nats, tokens = self._step_sums[0] + nats, self._step_sums[1] + tokens
        self._step_sums, self._scaled = (nats, tokens), False
        if not is_accumulating(self.trainer):
            self._scale()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradients of a step whose last micro-batch had no backward pass: its `training_step` gave None."""
        super().on_before_optimizer_step(optimizer)
        if not self._scaled:
            self._scale()

    def _scale(self) -> None:
        self._scaled = True
        if self._splits() == 1 or self._step_sums is None:
            return
        _REFUSED.check(self.trainer.strategy, "TokenMeanMixin:")
        assert self._capacity is not None
        factor = self._capacity * self._splits() / self._over_ranks(self._step_sums[1]).clamp(min=1)
        strategy: Any = self.trainer.strategy
        if weights_layout(strategy) == "engine":  # which holds them
            strategy.scale_gradients(factor)
        else:
            gradients = [local(p.grad) for p in self.parameters() if p.grad is not None]  # DTensors shard by shard
            for device in dict.fromkeys(gradient.device for gradient in gradients):  # offloaded ones are on the host
                own = [gradient for gradient in gradients if gradient.device == device]
                torch._foreach_mul_(own, where_read(factor, own))  # the host reads the factor only for its own

    def _splits(self) -> int:
        return self.trainer.accumulate_grad_batches * loss_ranks(self.trainer)

    def _over_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value.clone(), reduce_op="sum")  # it reduces in place
