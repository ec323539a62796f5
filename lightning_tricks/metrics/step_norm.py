"""The gradient norm of an optimizer step before its clip: the one place that measures it, for monitor and guard.

Lightning clips and throws the norm away. Here its clip is replaced by a clip that keeps the norm.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.objects import clip_hook, unwrapped
from lightning_tricks._trainer.run_facts import enabled_scaler
from lightning_tricks.mixins.gradient_clipping_mixin import GradientClippingMixin
from lightning_tricks.mixins.token_mean_mixin import TokenMeanMixin
from lightning_tricks.optim.clip import clip_grad_norm, clip_parameters_by_norm
from lightning_tricks.optim.grad_scaler import is_scaled, loss_scale

_KNOWN = {  # methods of a module that change the gradients by the clip alone, if at all before it is made
    pl.LightningModule.on_before_optimizer_step, TokenMeanMixin.on_before_optimizer_step,
    pl.LightningModule.configure_gradient_clipping, GradientClippingMixin.configure_gradient_clipping,
    pl.LightningModule.clip_gradients,
}  # fmt: skip


class StepNorm:
    """Each optimizer step's gradient norm before its clip, measured once for all who ask.

    Each fit has one, `MetricBuffer.of(trainer).step_norm()`. It is the L2 norm of all gradients of the optimizer, over
    all ranks and shards, without the scale of fp16:

    - in automatic optimization after the callbacks' hooks `on_before_optimizer_step`, before the module's hook and the
      clip. If Lightning clips by norm, or GradientClippingMixin clips, the clip measures it; a hook or a clip of the
      module's own takes one more pass over the gradients;
    - in manual optimization as the last `self.clip_gradients(...)` before the step finds them, else as the step does.

    Three methods of the precision plugin are replaced within each batch. DeepSpeed's engine calls none of them.

    Attributes:
        limit: of the last clip by norm; None before, 0 where there is none.
    """

    def __init__(self, trainer: Any) -> None:
        self.limit: float | None = None
        self._trainer = trainer
        self._before_clip: list[Callable[[Any], None]] = []
        self._at_step: list[Callable[[Any, Tensor], None]] = []
        self._norms: dict[Any, Tensor] = {}  # measured before a clip, by optimizer, until its step
        self._batch = ExitStack()  # closed when a batch ends

    def at_step(self, tell: Callable[[Any, Tensor], None], before_clip: Callable[[Any], None] | None = None) -> None:
        """Call `tell` with the optimizer and its norm after each clip, before the step; `before_clip` with the norm."""
        self._at_step.append(tell)
        self._before_clip += [before_clip] if before_clip else []

    def begin_batch(self) -> None:
        """Measure the steps of a batch."""
        self.end_batch()
        plugin, name = clip_hook(self._trainer)
        methods: dict[str, Callable[..., None]] = {
            name: self._around_clip, "clip_grad_by_norm": self._clip_by_norm, "clip_grad_by_value": self._clip_by_value
        }  # fmt: skip
        for replaced_name, method in methods.items():
            self._batch.enter_context(replaced(plugin, replaced_name, partial(method, getattr(plugin, replaced_name))))

    def end_batch(self) -> None:
        """Put back the plugin's methods. Idempotent."""
        self._batch.close()
        self._norms.clear()

    def before_hook(self, module: Any, optimizer: Any) -> None:
        """Measure before a hook `on_before_optimizer_step` of the module's own, which may change the gradients."""
        if not _known(module.on_before_optimizer_step) and unwrapped(optimizer) not in self._norms:
            self._measure(optimizer)

    def _around_clip(self, clip: Any, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        is_known = not module.automatic_optimization or self._clip_is_known(module)
        by_mixin = module.automatic_optimization and is_known and isinstance(module, GradientClippingMixin)
        if by_mixin:
            by_value = self._trainer.gradient_clip_algorithm == "value"
            self.limit = 0.0 if by_value else self._trainer.gradient_clip_val or 0.0
        if by_mixin and unwrapped(optimizer) not in self._norms:
            self._look(optimizer)
        elif not is_known:
            self._measure(optimizer)
        clip(module, optimizer, *args, **kwargs)
        if by_mixin:
            self._norms.setdefault(unwrapped(optimizer), module.grad_norm)
        elif unwrapped(optimizer) not in self._norms:
            self._measure(optimizer)
        norm = self._norms.pop(unwrapped(optimizer))
        for tell in self._at_step:
            tell(optimizer, norm)

    def _clip_is_known(self, module: Any) -> bool:
        """Whether only code of Lightning and of this package, which measures in its clip, changes the gradients."""
        plugin = self._trainer.precision_plugin
        return (
            _known(module.configure_gradient_clipping)
            and _known(module.clip_gradients)
            and type(plugin).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_tricks")
            and "clip_gradients" not in vars(plugin)
        )

    def _clip_by_norm(self, clip: Any, optimizer: Any, clip_val: int | float = 0.0) -> None:
        self.limit = float(clip_val)
        if getattr(clip, "__func__", None) is pl.plugins.Precision.clip_grad_by_norm:
            self._measure(optimizer, clip_val, scale_as_torch=True)  # in place of Lightning's own clip
        elif clip is clip_parameters_by_norm:  # FSDP2Strategy's
            self._measure(optimizer, clip_val)
        else:
            self._measure(optimizer)
            clip(optimizer, clip_val)

    def _clip_by_value(self, clip: Any, optimizer: Any, clip_val: int | float = 0.0) -> None:
        self._measure(optimizer)
        clip(optimizer, clip_val)

    def _measure(self, optimizer: Any, max_norm: float | None = None, *, scale_as_torch: bool = False) -> None:
        """Keep the norm: in automatic optimization that of the first clip, else that of the last one. Then clip."""
        key = unwrapped(optimizer)
        keeps = any(unwrapped(own) is key for own in self._trainer.optimizers)
        keeps &= key not in self._norms or not self._trainer.lightning_module.automatic_optimization
        if keeps:
            self._look(optimizer)
        if keeps or max_norm is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norm = clip_grad_norm(parameters, max_norm, scale_as_torch=scale_as_torch)
            if keeps:
                self._norms[key] = self.unscaled(norm, optimizer)

    def _look(self, optimizer: Any) -> None:
        for look in self._before_clip:
            look(optimizer)

    def unscaled(self, norms: Tensor, optimizer: Any) -> Tensor:
        """The norms without fp16's scale, which gradients still carry in manual optimization or before a fused step."""
        scaler = enabled_scaler(self._trainer.precision_plugin)
        if scaler is None or (scale := loss_scale(scaler)) is None or not is_scaled(scaler, unwrapped(optimizer)):
            return norms
        return norms / scale


def _known(method: Any) -> bool:
    return getattr(method, "__func__", None) in _KNOWN
