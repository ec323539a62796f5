"""fp16 products over fp32 weights with a scaled loss: for GPUs that multiply fp16 fast, but not bf16."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.objects import trainer_of, unwrapped
from lightning_tricks.optim.grad_scaler import drop_unfinished, has_overflowed, unscale
from lightning_tricks.precision.bf16_mixed import AutocastPrecision

__all__ = ["FP16Mixed"]


class FP16Mixed(AutocastPrecision):
    """Autocast to fp16 with a scaled loss; weights, gradients and optimizer state stay in fp32, on CUDA and on CPU.

    fp16 has no numbers between 0 and 6e-8, where many gradients lie; so the loss is multiplied by a scale and the
    gradients are divided by it. A step whose gradients overflow changes no weight, halves the scale and is counted.

    It does the same as Lightning's `precision: 16-mixed`, and more: gradients are unscaled before every hook, the norm
    and the clip, for fused optimizers too, and before `self.clip_gradients` in manual optimization. An overflowed step
    does not advance the schedulers that Lightning steps after each optimizer step (`interval: step`). Schedulers of an
    epoch or on a plateau go on, and so do yours in manual optimization: skip theirs when `skipped_steps` has grown. On
    a CPU it computes in fp16, where Lightning's flag gives bf16. Under FSDP2 the sharding casts instead of autocast
    (`fsdp2_policy`), and all ranks skip together.

    The decision to skip costs one read of the device per optimizer step, after the clip. If a module has several
    optimizers, the scale is updated at the next backward pass: until then other gradients may still carry the old one.

    Args:
        init_scale: of the first step; above 0. Torch's default, 2**16, is often too high, and the first steps halve it.
        growth_interval: steps without overflow after which the scale is doubled; 1 or more. Torch's default, 2000.
        loss_scaling: False trains without a scale, to see its effect: no step is skipped, `scaler` is None.

    Attributes:
        scaler: `torch.amp.GradScaler` on the model's device; its scale is in the checkpoint.
        skipped_steps: optimizer steps that overflowed since the run began, an int; in the checkpoint.
        fsdp2_policy: for a module that shards itself: `fully_shard(block, mp_policy=plugin.fsdp2_policy)`.

    Raises:
        UsageError: an option out of its range. When training starts: LBFGS, a strategy with a precision of
            its own (FSDP1, DeepSpeed).

    Source: Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740 (fp32 master weights, loss scaling);
        https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling (the scale's rule and its defaults).
    """

    precision = "16-mixed"
    _dtype = torch.float16

    def __init__(self, init_scale: float = 65536.0, growth_interval: int = 2000, loss_scaling: bool = True) -> None:
        if not 0 < init_scale <= torch.finfo(torch.float32).max:
            raise UsageError(f"init_scale={init_scale!r}: give a finite number above 0, such as 65536")
        if not growth_interval >= 1:
            raise UsageError(f"growth_interval={growth_interval!r}: give a number of steps, 1 or more")
        super().__init__()
        self.init_scale, self.growth_interval, self.loss_scaling = init_scale, growth_interval, loss_scaling
        self.skipped_steps = 0
        self.scaler = self._new_scaler()
        self._update_due = False
        self._held: list[tuple[Any, int]] = []  # configs of schedulers that skip a step, and their own frequencies

    def __repr__(self) -> str:
        options = ("init_scale", "growth_interval", "loss_scaling")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in options)})"

    def _new_scaler(self) -> torch.amp.GradScaler | None:
        if not self.loss_scaling:
            return None
        scale = float(self.init_scale)
        return torch.amp.GradScaler(self.device, init_scale=scale, growth_interval=self.growth_interval)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Find out the weights' device, and whether FSDP2 casts; the weights do not change."""
        device_type, trainer = self.device, trainer_of(module)
        module = super().convert_module(module)
        if self.device != device_type:
            self.scaler = self._new_scaler()
        if self.scaler is not None and trainer is not None:
            # creates the scale, which an optimizer step needs even if the first batch has no loss
            self.scaler.scale(torch.zeros((), device=trainer.strategy.root_device))
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Refuse LBFGS."""
        if self.scaler is not None and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise UsageError(
                "optimizer: LBFGS computes its loss several times a step, FP16Mixed scales it once: use AdamW"
            )
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scale the loss."""
        self._update_scale()
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Unscale, then clip: in manual optimization the module clips before its step."""
        if self.scaler is not None:
            unscale(self.scaler, unwrapped(optimizer))
        super().clip_gradients(optimizer, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: torch.optim.Optimizer,
        model: "pl.LightningModule",
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, unscale, run the hooks and the clip; then step, or skip the step where it overflowed."""
        self._release_schedulers()
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        unscale(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        overflowed = has_overflowed(self.scaler, optimizer)
        # not scaler.step: it would read the device again, and make a fused optimizer decide again
        result = None if overflowed else optimizer.step(**kwargs)
        self._update_due = True
        if len(model.trainer.optimizers) == 1:  # otherwise another's gradients may still carry this scale
            self._update_scale()
        if overflowed:
            self.skipped_steps += 1
            self._hold_schedulers(model.trainer.lr_scheduler_configs)
        return result

    def _update_scale(self) -> None:
        if self.scaler is not None and self._update_due:
            self.scaler.update()
        self._update_due = False

    def _hold_schedulers(self, configs: Iterable[Any]) -> None:
        """Keep Lightning from stepping them until the next optimizer step; a scheduler's own state is unchanged."""
        for config in configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                self._held.append((config, config.frequency))
                config.frequency = sys.maxsize

    def _release_schedulers(self) -> None:
        for config, frequency in self._held:
            config.frequency = frequency
        self._held = []

    def state_dict(self) -> dict[str, Any]:
        """The scale, the steps since it changed, and the skipped steps; not the options, which belong to the recipe."""
        self._update_scale()
        state: dict[str, Any] = {"skipped_steps": self.skipped_steps}
        if self.scaler is not None:
            whole = self.scaler.state_dict()
            state |= {"scale": whole["scale"], "_growth_tracker": whole["_growth_tracker"]}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, of a run with loss scaling or without."""
        self.skipped_steps = state_dict["skipped_steps"]
        if self.scaler is not None and "scale" in state_dict:
            # torch grows the scale when the count equals the interval: a count beyond a shorter one never would
            steps = min(state_dict["_growth_tracker"], self.growth_interval - 1)
            state = {**self.scaler.state_dict(), "scale": state_dict["scale"], "_growth_tracker": steps}
            self.scaler.load_state_dict(state)

    def teardown(self) -> None:
        """Give the schedulers their frequencies back, make a scale update that is due, and drop unfinished steps."""
        self._release_schedulers()
        self._update_scale()
        if self.scaler is not None:
            drop_unfinished(self.scaler)
