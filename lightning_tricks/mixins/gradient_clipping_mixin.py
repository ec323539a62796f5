"""Clip once and keep the gradient norm before the clip: logging it costs no second pass over the gradients."""

from typing import Any

import torch
from torch import Tensor

from lightning_tricks._trainer.refusals import GRADIENT_NORM
from lightning_tricks._trainer.run_facts import enabled_scaler, weights_layout
from lightning_tricks.mixins._base import Mixin
from lightning_tricks.optim import clip_grad_norm, clip_grad_value
from lightning_tricks.optim.grad_scaler import refuse_scaled

__all__ = ["GradientClippingMixin"]


class GradientClippingMixin(Mixin):
    """Own `configure_gradient_clipping`: clip by the Trainer's settings, and keep the norm in `grad_norm`.

    Put it before the LightningModule in the bases. `trainer.gradient_clip_val` and `gradient_clip_algorithm` keep their
    meaning (0 or none does not clip); in each case the norm is kept, for `GradNormMonitor`. It also clips gradients
    that Lightning or torch refuses to clip: FSDP2's, and those of fused optimizers under bf16 (Lightning 2.6).

    Attributes:
        grad_norm: L2 norm of all gradients of the last optimizer step before its clip, a 0-dim tensor on their device;
            None before the first step, in manual optimization, and under DeepSpeed, whose engine clips by itself.

    Raises:
        UsageError: at the first step: a negative clip value; a fused optimizer under Lightning's fp16, whose gradients
            are still scaled here (`FP16Mixed` unscales them before); FSDP1; sparse gradients.

    Source: see `clip_grad_norm`.
    """

    grad_norm: Tensor | None = None
    keeps_grad_norm = True  # DeepSpeedZeROStrategy asks for this

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of `optimizer`; Lightning calls it once before each optimizer step, after unscaling."""
        strategy: Any = self.trainer.strategy
        if weights_layout(strategy) in ("engine", "foreign engine"):
            return
        GRADIENT_NORM.check(strategy, "GradientClippingMixin:")
        scaler = enabled_scaler(self.trainer.precision_plugin)
        refuse_scaled(scaler, optimizer, "GradientClippingMixin", self.trainer.precision)
        by_value = gradient_clip_algorithm == "value" and bool(gradient_clip_val)
        max_norm = None if by_value else gradient_clip_val or None  # 0: no clipping, as in Lightning
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.grad_norm = clip_grad_norm(parameters, max_norm)
        if by_value:
            clip_grad_value(parameters, gradient_clip_val or 0.0)
