"""Log the effect of a precision plugin on the numbers: the loss scale of fp16, the share of the products in fp8."""

from typing import Any

import torch
from torch import Tensor

from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.run_facts import enabled_scaler
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.optim.grad_scaler import loss_scale

__all__ = ["PrecisionMonitor"]


def has_figures(plugin: Any) -> bool:
    """Whether a precision plugin gives `PrecisionMonitor` anything to record."""
    return enabled_scaler(plugin) is not None or hasattr(plugin, "fp8_layers")


class PrecisionMonitor(pl.Callback):
    """Record how a 16-bit or 8-bit format copes with the run's numbers. Never changes training.

    With loss scaling, of every optimizer step:

    - `precision/loss_scale`: the scale that the step used. Two steps within one batch: the second's.
    - `precision/skipped_steps`: how many steps have been skipped for an overflow since the run began, this one
      included. It is the plugin's own `skipped_steps`; a plugin without one has skipped a step where its scale fell.

    In fp8, on each log step:

    - `precision/fp8_share`: share of the multiply-adds of all linear layers that is in fp8.

    It reads attributes of the Trainer's precision plugin: `scaler`, as Lightning's own plugin has it, or `fp8_layers`
    and `converted_share`. For any other plugin, one warning is printed and nothing is recorded.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py (when a step is skipped and how the
        scale moves).
    """

    def __init__(self) -> None:
        self._used: Tensor | None = None  # the scale of a step whose outcome is not known yet
        self._counted = 0
        self._skipped: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer, and start counting; a checkpoint is loaded later."""
        if stage != "fit":  # a checkpoint that is saved after a validation still has the count
            return
        self._buffer = MetricBuffer.of(trainer)
        self._counted, self._skipped, self._used = 0, None, None

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Read the share in fp8: the plugin has converted the layers by now."""
        plugin: Any = trainer.precision_plugin
        if not has_figures(plugin):
            name = type(plugin).__name__
            rank_zero_warn(f"PrecisionMonitor records nothing: {name} neither scales the loss nor multiplies in fp8")
        self._share = float(plugin.converted_share) if hasattr(plugin, "fp8_layers") else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the scale, before the scaler writes the next one into its place."""
        scaler = enabled_scaler(trainer.precision_plugin)
        scale = loss_scale(scaler) if scaler is not None else None
        if scale is not None:
            self._settle(trainer.precision_plugin)
            self._used = scale.clone()
            self._buffer.record("precision/loss_scale", self._used)

    def _settle(self, plugin: Any) -> None:
        """Count the last step if it was skipped; on the device, where nobody waits for the answer."""
        if self._used is None:
            return
        used, self._used = self._used, None
        skipped = getattr(plugin, "skipped_steps", None)
        if skipped is None:
            if self._skipped is None:
                self._skipped = torch.full((), self._counted, dtype=torch.int64, device=used.device)
            scale = loss_scale(plugin.scaler)
            assert scale is not None  # the step has used one
            skipped = self._skipped = self._skipped + (scale < used)
        self._buffer.record("precision/skipped_steps", skipped)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the skipped steps, and on log steps the share in fp8."""
        self._settle(trainer.precision_plugin)
        if self._share is not None and not is_accumulating(trainer) and self._buffer.is_log_step():
            self._buffer.record("precision/fp8_share", self._share)

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps, if this monitor counts them and not the plugin."""
        counted = self._counted if self._skipped is None else int(self._skipped)
        return {"skipped_steps": counted} if counted else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._counted = state_dict["skipped_steps"]
