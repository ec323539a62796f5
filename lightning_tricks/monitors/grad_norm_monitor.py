"""Log the gradient norm before the clip, as the clip itself computes it: no second pass over the gradients.

Lightning clips and throws the norm away. Here its clip is replaced by a clip that records the norm.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name, find_blocks
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._refusals import refuse
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import enabled_scaler, is_accumulating, optimizer_index, unwrapped, weights_layout
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.optim import clip_grad_norm, grad_norms_of
from lightning_tricks.optim.grad_scaler import is_scaled, loss_scale

Parts = Literal["block", "group"]
Measured = dict[tuple[str, ...], Tensor]  # by the names of the metrics, a value for each


def interval_figures(norms: list[float], clip_val: float | None) -> dict[str, float]:
    """Figures over one logging interval: the `norms` of its steps before the clip to `clip_val`, None without a clip.

    `train/nonfinite_grad_norms` is the number of steps whose norm was infinite or NaN; `train/clipped_fraction`, only
    with a clip, the share of the other steps whose norm was above the limit.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    figures = {"train/nonfinite_grad_norms": float(len(norms) - len(finite))}
    if clip_val and finite:
        figures["train/clipped_fraction"] = sum(norm > clip_val for norm in finite) / len(finite)
    return figures


def clip_by_norm(trainer: Any, optimizer: Any, max_norm: float | None) -> Tensor:
    """Clip an optimizer's gradients to `max_norm`, or only measure them. Every rank must call.

    Returns:
        The norm before the clip, without the scale of a scaled loss, a 0-dim tensor.
    """
    norm = clip_grad_norm(_parameters(optimizer), max_norm, scale_as_torch=True)  # in place of Lightning's own clip
    return _unscaled(norm, trainer, optimizer)


def parameters_by_block(module: nn.Module, parameters: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """`parameters` by the repeated block that holds them; else by the largest module that holds them and no block."""
    wanted, blocks = {id(parameter) for parameter in parameters}, list(find_blocks(module))
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in wanted:
            continue
        words = clean_name(name).split(".")
        paths = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        candidates = (p for p in paths if p in blocks or not any(block.startswith(f"{p}.") for block in blocks))
        parts.setdefault(next(candidates), []).append(parameter)
    return parts


class GradNormMonitor(pl.Callback):
    """Record `train/grad_norm` of every optimizer step, before the clip. Never changes training.

    The L2 norm of all gradients of the optimizer, of the whole accumulated batch, unscaled under fp16, over all ranks
    and shards (DDP, FSDP2, tensor parallelism; DeepSpeed's is read from its engine). Each interval's last step
    also gets `train/clipped_fraction` and `train/nonfinite_grad_norms`. With several optimizers the names are
    `train/grad_norm/0`, `train/grad_norm/1` and so on, without those two.

    In automatic optimization it is the norm of the gradients as this callback's `on_before_optimizer_step` finds them,
    whatever changes them later in the step (a hook of the module, a callback behind this one, the Trainer's clip). The
    clip measures for both, unless code comes before it that neither Lightning nor this package wrote: that may change
    the gradients, so they are measured twice. In manual optimization it is the norm before the last
    `self.clip_gradients(...)` before a step, or, without one, the norm that the step finds. Where one optimizer steps
    several times in a batch, or asks for several gradients (LBFGS), the largest norm of the batch is recorded.

    The precision plugin's methods `clip_grad_by_norm` and, in manual optimization, `clip_grad_by_value` are replaced
    for a part of each batch.

    Args:
        per: also record, on log steps, `grad_norms/<name>` of each block of the model (`block`) or of each parameter
            group of the optimizer (`group`); one more pass over the gradients on those steps.

    Raises:
        UsageError: FSDP1; `per` under DeepSpeed, which holds no parameter whole; in training, sparse gradients.

    Source: Pascanu et al. 2012, https://arxiv.org/abs/1211.5063.
    """

    def __init__(self, per: Parts | None = None) -> None:
        if per is not None and per not in get_args(Parts):
            raise UsageError(f"per={per!r}: give one of {', '.join(get_args(Parts))}, or none")
        self.per = per
        self._clip_val: float | None = None
        self._batch = ExitStack()  # closed when a batch ends
        self._before_clip: dict[Any, Measured] = {}  # in manual optimization, by optimizer, until its step
        self._largest: Measured = {}  # of the batch

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse strategies under which the norms are not known, before any process is started."""
        if stage != "fit":
            return
        refuse("the gradient norm", trainer.strategy, "GradNormMonitor:")
        if self.per:
            refuse("GradNormMonitor.per", trainer.strategy, f"GradNormMonitor: per={self.per!r}")

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse it where no command has; find the buffer."""
        self.check_run(trainer, None, "fit")
        self._has_engine = weights_layout(trainer.strategy) == "engine"
        self._clip_val = None
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._of_interval)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """In manual optimization, measure before each clip of the batch."""
        if pl_module.automatic_optimization or self._has_engine:
            return
        plugin: Any = trainer.precision_plugin
        by_norm, by_value = plugin.clip_grad_by_norm, plugin.clip_grad_by_value
        replaces = _is_library_code(by_norm)  # else it is a method of the user's, which clips in its own way

        def measure(optimizer: Any, max_norm: float | None = None) -> bool:
            own = any(unwrapped(known) is unwrapped(optimizer) for known in trainer.optimizers)
            if own:
                self._before_clip[unwrapped(optimizer)] = self._measure(trainer, pl_module, optimizer, max_norm)
            return own

        def clip_grad_by_norm(optimizer: Any, clip_val: int | float = 0.0) -> None:
            self._clip_val = float(clip_val)
            clipped = measure(optimizer, clip_val if replaces else None) and replaces
            if not clipped:
                by_norm(optimizer, clip_val)

        def clip_grad_by_value(optimizer: Any, clip_val: int | float = 0.0) -> None:
            measure(optimizer)
            by_value(optimizer, clip_val)

        self._batch.callback(self._before_clip.clear)
        self._batch.enter_context(replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm))
        self._batch.enter_context(replaced(plugin, "clip_grad_by_value", clip_grad_by_value))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Measure, or let the clip measure."""
        if self._has_engine:
            return
        if pl_module.automatic_optimization:
            self._batch.close()  # optimizers such as LBFGS come here several times a step
            self._measure_or_let_clip(trainer, pl_module, optimizer)
        else:
            known = self._before_clip.pop(unwrapped(optimizer), None)
            self._record(known or self._measure(trainer, pl_module, optimizer))

    def _measure_or_let_clip(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        clip_is_next = self._clip_is_next(trainer, pl_module)
        limit = 0.0 if trainer.gradient_clip_algorithm == "value" else trainer.gradient_clip_val or 0.0
        if getattr(type(pl_module), "keeps_grad_norm", False):  # GradientClippingMixin
            if _is_library_code(pl_module.configure_gradient_clipping):
                self._clip_val = limit
            if clip_is_next:
                self._record(self._measure_parts(trainer, pl_module, optimizer))
                self._batch.callback(self._record_kept, pl_module, pl_module.grad_norm)
                return
        clip_measures = clip_is_next and limit > 0
        if not clip_measures:
            self._record(self._measure(trainer, pl_module, optimizer))

        def clip_grad_by_norm(of: Any, clip_val: int | float = 0.0) -> None:
            self._clip_val = float(clip_val)
            if clip_measures:
                self._record(self._measure(trainer, pl_module, of, clip_val))
            else:
                clip_by_norm(trainer, of, clip_val)

        plugin = trainer.precision_plugin
        if _is_library_code(plugin.clip_grad_by_norm):
            self._batch.enter_context(replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm))

    def _clip_is_next(self, trainer: Any, pl_module: Any) -> bool:
        """Whether only code of Lightning and of this package, which leaves gradients alone, runs before the clip."""
        plugin, callbacks = trainer.precision_plugin, trainer.callbacks
        later = callbacks[callbacks.index(self) :] if self in callbacks else callbacks
        code = [callback.on_before_optimizer_step for callback in later]
        code += [pl_module.on_before_optimizer_step, pl_module.configure_gradient_clipping, pl_module.clip_gradients]
        return all(map(_is_library_code, [*code, type(plugin), plugin.clip_gradients, plugin.clip_grad_by_norm]))

    def _measure(self, trainer: Any, pl_module: Any, optimizer: Any, max_norm: float | None = None) -> Measured:
        """Measure all that is to be recorded of the gradients, then clip them to `max_norm`."""
        parts = self._measure_parts(trainer, pl_module, optimizer)
        name = f"train/grad_norm{self._suffix(trainer, optimizer)}"
        return {(name,): clip_by_norm(trainer, optimizer, max_norm), **parts}

    def _measure_parts(self, trainer: Any, pl_module: Any, optimizer: Any) -> Measured:
        if self.per is None or not self._buffer.is_log_step():
            return {}
        if self.per == "block":
            parts = parameters_by_block(pl_module, _parameters(optimizer))
        else:
            parts = {group.get("name", str(i)): group["params"] for i, group in enumerate(optimizer.param_groups)}
        norms = _unscaled(grad_norms_of(list(parts.values())), trainer, optimizer)
        return {tuple(f"grad_norms{self._suffix(trainer, optimizer)}/{name}" for name in parts): norms}

    def _suffix(self, trainer: Any, optimizer: Any) -> str:
        return f"/{optimizer_index(trainer, optimizer)}" if len(trainer.optimizers) > 1 else ""

    def _record(self, measured: Measured) -> None:
        """Record the norms of a step, or what is larger of them and of those of earlier steps of the batch."""
        for names, norms in measured.items():
            earlier = self._largest.get(names)
            self._largest[names] = norms if earlier is None else torch.maximum(earlier, norms)  # NaN stays
            self._buffer.record_all(names, self._largest[names])

    def _record_kept(self, pl_module: Any, earlier: Tensor | None) -> None:
        if pl_module.grad_norm is not earlier:  # else the step failed before the clip
            self._record({("train/grad_norm",): pl_module.grad_norm})

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Put back the plugin's methods; under DeepSpeed, ask its engine for the norm."""
        self._end_batch()
        if self._has_engine and not is_accumulating(trainer):
            engine: Any = trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
            self._clip_val, norm = trainer.gradient_clip_val, engine.get_global_grad_norm()
            if norm is not None:
                self._buffer.record("train/grad_norm", norm)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put back the plugin's methods where a module has ended the epoch in its `on_train_batch_start`."""
        self._end_batch()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put back the plugin's methods."""
        self._end_batch()

    def _end_batch(self) -> None:
        self._batch.close()
        self._largest.clear()

    def _of_interval(self, rows: list[Row]) -> dict[str, float]:
        norms = [row.values["train/grad_norm"] for row in rows if "train/grad_norm" in row.values]
        return interval_figures(norms, self._clip_val) if norms else {}


def _is_library_code(code: Any) -> bool:
    """Whether Lightning or this package wrote a method or class: by its globals, which `functools.wraps` keeps."""
    function = getattr(code, "__func__", code)
    module = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_tricks")


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unscaled(norms: Tensor, trainer: Any, optimizer: Any) -> Tensor:
    """The norms without fp16's scale, which gradients still carry in manual optimization or before a fused step."""
    scaler = enabled_scaler(trainer.precision_plugin)
    if scaler is None or (scale := loss_scale(scaler)) is None or not is_scaled(scaler, unwrapped(optimizer)):
        return norms
    return norms / scale
