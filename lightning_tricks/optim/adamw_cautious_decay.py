"""AdamW with cautious weight decay: a weight decays only in steps whose update moves it towards 0."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.tensors import local, where_read
from lightning_tricks.optim.bf16_step import without_hooks
from lightning_tricks.optim.one_kernel import in_place

__all__ = ["AdamWCautiousDecay"]


def decay_towards_zero_(weight: Tensor, update: Tensor, decay: float | Tensor) -> None:
    """Multiply by 1 - `decay`, in place, the weights that an update, which is subtracted, moves towards 0.

    Where the update is NaN, the weight stays as it is. Only the sign of the update counts.
    """
    # on a CPU, `torch.where` takes as long as all of this
    weight.mul_(1 - (update * weight >= 0) * decay)


def _decay_adamw_(
    weight: Tensor, average: Tensor, gradient: Tensor, rate: Tensor, decay: Tensor, loss_scale: Tensor | None
) -> None:
    """The same for the update of AdamW's next step, which has the sign of its next average of gradients."""
    gradient = gradient if loss_scale is None else gradient / loss_scale
    decay_towards_zero_(weight, average.lerp(gradient, rate.to(average.dtype)), decay)


class AdamWCautiousDecay(torch.optim.AdamW):
    """AdamW whose weight decay leaves out weights that the update moves away from 0; no further state, no new option.

    With m and v, the corrected averages of this step, and u = m / (sqrt(v) + eps), a step is
    w <- w - lr * u - lr * weight_decay * w * (u * w >= 0). torch's fused kernel does the rest; the decay comes before
    it in one pass over weights, gradients and averages. Where the decay is 0, the step is AdamW's, to the bit.
    Checkpoints are those of AdamW.

    Args:
        params: parameters or groups.
        lr: learning rate; 3e-4 as `default_adamw`.
        betas: of the two averages; (0.9, 0.95) as `default_adamw`.
        eps: added to the root of the second average.
        weight_decay: torch's default; `build_optimizer` and OptimizerMixin have their own.
        fused: AdamW's single kernel for all parameters.

    Source: Chen et al. 2025, https://arxiv.org/abs/2510.12402; the formula as in the README.md of
        https://github.com/gdevos010/simply-pytorch.
    """

    mup_rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Decay, then make AdamW's step without decay; the closure runs once, before both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                if group["weight_decay"]:
                    self._decay(group)
                group["weight_decay"] = 0.0
            with without_hooks(self):  # those of this step have run
                super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    def _decay(self, group: dict[str, Any]) -> None:
        numbers: dict[Any, tuple[Tensor, Tensor, Tensor | None]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            weight, gradient = local(param), local(param.grad)
            # before the first step the average is 0, and the next one has the sign of the gradient
            average = local(self.state[param]["exp_avg"]) if self.state.get(param) else gradient
            tensors = [weight, average, gradient]
            if weight.is_complex():
                tensors = [torch.view_as_real(tensor) for tensor in tensors]
            if (kind := (weight.device, tensors[0].dtype)) not in numbers:
                numbers[kind] = self._numbers(group, tensors[0])
            in_place(_decay_adamw_, tensors, lambda _: numbers[kind], type(self).__name__)

    def _numbers(self, group: dict[str, Any], like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The last arguments of `_decay_adamw_`, filled on the device; in a skipped step nothing decays."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        one = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        rate, decay = one * (1 - group["betas"][0]), one * group["lr"] * group["weight_decay"]
        if found_inf is not None:
            decay = decay * (where_read(found_inf, [like]) == 0)
        return rate, decay, None if scale is None else where_read(scale, [like])
