"""Log the effect of a precision plugin on the numbers: the loss scale of fp16, ranges and lost small values of fp8."""

from typing import Any

import torch
from torch import Tensor

from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer import is_accumulating
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.monitors.precision.fp8_watch import Fp8Watch
from lightning_tricks.optim.grad_scaler import loss_scale


def scales_loss(plugin: Any) -> bool:
    """Whether a precision plugin has a gradient scaler that is on."""
    scaler = getattr(plugin, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def has_figures(plugin: Any) -> bool:
    """Whether a precision plugin gives `PrecisionMonitor` anything to record."""
    return scales_loss(plugin) or hasattr(plugin, "fp8_layers")


class PrecisionMonitor(pl.Callback):
    """Record how a 16-bit or 8-bit format copes with the run's numbers. Never changes training.

    With loss scaling, of every optimizer step:

    - `precision/loss_scale`: the scale that the step used. Two steps within one batch: the second's.
    - `precision/skipped_steps`: how many steps have been skipped for an overflow since the run began, this one
      included. It is the plugin's own `skipped_steps`; a plugin without one has skipped a step where its scale fell.

    In fp8, of each log step's last micro-batch:

    - `precision/fp8_share`: share of the multiply-adds of all linear layers that is in fp8.
    - `fp8/<layer>/input_amax`, `/weight_amax`: largest absolute value, over ranks as well.
    - `fp8/<layer>/input_underflow`, `/weight_underflow`: share of the nonzero values that become zero in fp8 (0 to 1),
      the mean over ranks.
    - `precision/fp8_underflow_max`: the largest `input_underflow` of any layer.

    It reads attributes of the Trainer's precision plugin: `scaler`, as Lightning's own plugin has it, or `fp8_layers`,
    `converted_share` and `layer_stats`. For any other plugin, one warning is printed and nothing is recorded.

    Layers inside modules that are compiled one by one are measured in an eager run of these modules just before their
    own, without gradients and in evaluation mode, so that the graph, random numbers and buffers stay as they are:
    one more forward pass of the blocks on log steps. Dropout before a layer is off there.

    Args:
        per_layer: measure the layers. False: of the fp8 metrics, only `precision/fp8_share` is recorded.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py (when a step is skipped and how the
        scale moves); Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (what fp8 holds).
    """

    def __init__(self, per_layer: bool = True) -> None:
        self.per_layer = per_layer
        self._watch: Fp8Watch | None = None
        self._used: Tensor | None = None  # the scale of a step whose outcome is not known yet
        self._counted = 0
        self._skipped: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer, and start counting; a checkpoint is loaded later."""
        self._buffer = MetricBuffer.of(trainer)
        self._counted, self._skipped, self._used = 0, None, None

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the fp8 layers: the plugin has converted them by now."""
        plugin: Any = trainer.precision_plugin
        if not has_figures(plugin):
            name = type(plugin).__name__
            rank_zero_warn(f"PrecisionMonitor records nothing: {name} neither scales the loss nor multiplies in fp8")
        self._share = float(plugin.converted_share) if hasattr(plugin, "fp8_layers") else None
        if self._share is not None and self.per_layer:
            self._watch = Fp8Watch(plugin, pl_module, self._buffer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Measure in the last micro-batch of a log step."""
        if self._watch is not None:
            self._watch.start_batch(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the scale, before the scaler writes the next one into its place."""
        plugin: Any = trainer.precision_plugin
        scale = loss_scale(plugin.scaler) if scales_loss(plugin) else None
        if scale is not None:
            self._settle(plugin)
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
        """Record the skipped steps, and on log steps the fp8 metrics."""
        self._settle(trainer.precision_plugin)
        if self._share is not None and not is_accumulating(trainer) and self._buffer.is_log_step():
            self._buffer.record("precision/fp8_share", self._share)
        if self._watch is not None:
            self._watch.end_batch(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps, if this monitor counts them and not the plugin."""
        counted = self._counted if self._skipped is None else int(self._skipped)
        return {"skipped_steps": counted} if counted else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._counted = state_dict["skipped_steps"]

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the model as it was."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the model as it was."""
        self.on_fit_end(trainer, pl_module)
