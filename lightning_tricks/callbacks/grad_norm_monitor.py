"""Log the gradient norm from before the clip: the one that the clip computes, never a second pass.

Lightning clips and throws the norm away. Here the norm is measured once, given to the clip, and recorded.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import find_blocks
from lightning_tricks._lightning import pl
from lightning_tricks.callbacks.lr_monitor import place_of
from lightning_tricks.callbacks.metric_buffer import MetricBuffer, Row
from lightning_tricks.optim import clean_name, clip_grad_norm, clip_grad_norm_fsdp1, grad_norms_of

Parts = Literal["block", "group"]


def interval_figures(norms: list[float], clip_val: float | None) -> dict[str, float]:
    """What an interval's norms say together.

    Args:
        norms: of each step, before the clip.
        clip_val: the limit, None without a clip by norm.

    Returns:
        `train/nonfinite_grad_norms`, the number of steps whose norm was infinite or NaN, and, with a clip,
        `train/clipped_fraction` of the steps with a finite norm that were above the limit.
    """
    finite = [norm for norm in norms if abs(norm) < float("inf")]  # also False for NaN
    figures = {"train/nonfinite_grad_norms": float(len(norms) - len(finite))}
    if clip_val and finite:
        figures["train/clipped_fraction"] = sum(norm > clip_val for norm in finite) / len(finite)
    return figures


def parameters_by_block(module: nn.Module, parameters: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Which of `parameters` are in which repeated block; those outside go by the largest module without a block."""
    wanted, blocks = {id(parameter) for parameter in parameters}, list(find_blocks(module))
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in wanted:
            continue
        words = clean_name(name).split(".")
        paths = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        free = (path for path in paths if path in blocks or not any(block.startswith(f"{path}.") for block in blocks))
        parts.setdefault(next(free), []).append(parameter)
    return parts


class GradNormMonitor(pl.Callback):
    """Record `train/grad_norm` of every optimizer step, before the clip. Never changes training.

    The L2 norm of all gradients of the optimizer, of the whole accumulated batch, unscaled under fp16, over all ranks
    and shards (DDP, FSDP2, tensor parallelism, FSDP1; DeepSpeed's is read from its engine). Each interval's last step
    also gets `train/clipped_fraction` and `train/nonfinite_grad_norms`. With several optimizers the names are
    `train/grad_norm/0`, `train/grad_norm/1` and so on, without those two.

    The norm is handed to the Trainer's clip, which then needs no pass of its own; under FSDP1 this also gives the clip
    by norm that Lightning refuses. A module that overrides `configure_gradient_clipping` keeps its own way. In manual
    optimization the norm is that of `self.clip_gradients(...)` where the module calls it, else that of the gradients
    as the step finds them.

    Args:
        per: also record, on log steps, `grad_norms/<name>` of each block of the model (`block`) or of each parameter
            group of the optimizer (`group`); one more pass over the gradients on those steps.

    Raises:
        UsageError: `per` under FSDP1 or DeepSpeed, which hold no parameter whole; modules wrapped in FSDP1 one by one.

    Source: Pascanu et al. 2012, https://arxiv.org/abs/1211.5063.
    """

    def __init__(self, per: Parts | None = None) -> None:
        if per is not None and per not in get_args(Parts):
            raise UsageError(f"per={per!r}: give one of {', '.join(get_args(Parts))}, or none")
        self.per = per
        self._known: dict[int, Tensor] = {}  # by optimizer: measured, and not yet used by the clip
        self._clipped: dict[int, Tensor] = {}  # by optimizer: what the clip of the running step found
        self._clip_val: float | None = None
        self._replaced: list[tuple[Any, str]] = []

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Find the buffer."""
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._of_interval)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stand between the module and the clip, until training ends."""
        if self.per and _is(trainer.strategy, "FSDPStrategy", "DeepSpeedStrategy"):
            raise UsageError(
                f"GradNormMonitor: per={self.per!r} under {type(trainer.strategy).__name__}, which holds no parameter "
                "whole: leave it out, or use FSDP2Strategy"
            )
        if _is(trainer.strategy, "DeepSpeedStrategy"):
            return  # its engine clips
        configure, plugin = pl_module.configure_gradient_clipping, trainer.precision_plugin

        # functions, not bound methods: a copy of the module must not copy this callback and its Trainer
        def configure_gradient_clipping(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._around_the_clip(trainer, pl_module, optimizer, configure, args, kwargs)

        def clip_grad_by_norm(optimizer: Any, clip_val: int | float = 0.0) -> None:
            self._clip(trainer, optimizer, clip_val)

        pl_module.configure_gradient_clipping = configure_gradient_clipping  # type: ignore[method-assign]
        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        self._replaced = [(pl_module, "configure_gradient_clipping"), (plugin, "clip_grad_by_norm")]

    def _around_the_clip(
        self,
        trainer: Any,
        pl_module: Any,
        optimizer: Any,
        configure: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Measure, let the module clip, record. `configure` is the module's own method."""
        key, clip_val = id(_unwrapped(optimizer)), args[0] if args else kwargs.get("gradient_clip_val")
        self._record_parts(trainer, pl_module, optimizer)
        if getattr(type(pl_module), "keeps_grad_norm", False):
            configure(optimizer, *args, **kwargs)
            by_value = "value" in (*args, kwargs.get("gradient_clip_algorithm"))
            self._clip_val = None if by_value else clip_val
            self._record(trainer, optimizer, pl_module.grad_norm)  # a mixin may refuse what is scaled: it never is
            return
        plain = configure.__module__.endswith(".core.module")  # Lightning's own: it does nothing but clip
        measured: Tensor | None = None
        if not (plain and clip_val and _is(trainer.strategy, "FSDPStrategy")):  # whose clip has to measure by itself
            measured = self._measure(trainer, optimizer)
        if plain and measured is not None:
            self._known[key] = measured
        configure(optimizer, *args, **kwargs)
        measured = None if measured is None else _unscaled(measured, trainer, optimizer)
        self._record(trainer, optimizer, self._clipped.pop(key, measured))

    def _clip(self, trainer: Any, optimizer: Any, clip_val: int | float) -> None:
        """What the precision plugin does when the module clips by norm."""
        key = id(_unwrapped(optimizer))
        self._clip_val = float(clip_val)
        if _is(trainer.strategy, "FSDPStrategy"):
            self._clipped[key] = clip_grad_norm_fsdp1(trainer.strategy.model, clip_val)
        else:
            self._clipped[key] = clip_grad_norm(_parameters(optimizer), clip_val, self._known.pop(key, None))
        # in manual optimization the module may clip what is still scaled
        self._clipped[key] = _unscaled(self._clipped[key], trainer, optimizer)

    def _measure(self, trainer: Any, optimizer: Any) -> Tensor:
        if _is(trainer.strategy, "FSDPStrategy"):
            return clip_grad_norm_fsdp1(trainer.strategy.model, None)
        return clip_grad_norm(_parameters(optimizer), None)

    def _record(self, trainer: Any, optimizer: Any, norm: Tensor | float | None) -> None:
        if norm is not None:
            several = len(trainer.optimizers) > 1
            name = f"train/grad_norm/{place_of(optimizer, trainer.optimizers)}" if several else "train/grad_norm"
            self._buffer.record(name, norm)

    def _record_parts(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.per is None or not self._buffer.is_log_step():
            return
        parts = _groups(optimizer) if self.per == "group" else parameters_by_block(pl_module, _parameters(optimizer))
        norms = _unscaled(grad_norms_of(list(parts.values())), trainer, optimizer)
        several = f"{place_of(optimizer, trainer.optimizers)}/" if len(trainer.optimizers) > 1 else ""
        self._buffer.record_all(tuple(f"grad_norms/{several}{name}" for name in parts), norms)

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: torch.optim.Optimizer
    ) -> None:
        """In manual optimization, where Lightning calls no clip by itself, record what the step is about to use."""
        if pl_module.automatic_optimization or _is(trainer.strategy, "DeepSpeedStrategy"):
            return
        norm = self._clipped.pop(id(_unwrapped(optimizer)), None)
        if norm is None:
            norm = _unscaled(self._measure(trainer, optimizer), trainer, optimizer)
        self._record_parts(trainer, pl_module, optimizer)
        self._record(trainer, optimizer, norm)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Under DeepSpeed, ask its engine."""
        strategy: Any = trainer.strategy
        if _is(strategy, "DeepSpeedStrategy") and not trainer.fit_loop._should_accumulate():
            self._clip_val = trainer.gradient_clip_val
            self._record(trainer, trainer.optimizers[0], strategy.deepspeed_engine.get_global_grad_norm())

    def _of_interval(self, rows: list[Row]) -> dict[str, float]:
        norms = [row.values["train/grad_norm"] for row in rows if "train/grad_norm" in row.values]
        return interval_figures(norms, self._clip_val) if norms else {}

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Leave the module and the plugin as they were."""
        self._withdraw()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Leave the module and the plugin as they were."""
        self._withdraw()

    def _withdraw(self) -> None:
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced = []


def _is(strategy: Any, *names: str) -> bool:
    """Whether a strategy is of a class of Lightning's, by its name: the Trainer may be of either Lightning package."""
    return any(cls.__name__ in names for cls in type(strategy).__mro__)


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Any) -> dict[str, list[Tensor]]:
    return {group.get("name", str(index)): group["params"] for index, group in enumerate(optimizer.param_groups)}


def _unscaled(norms: Tensor, trainer: Any, optimizer: Any) -> Tensor:
    """Divide by the scale of fp16's scaler where gradients still carry it: fused optimizers unscale in their step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return norms
    stage = scaler._per_optimizer_states[id(_unwrapped(optimizer))]["stage"]
    scale = scaler._get_scale_async()
    return norms if stage.name != "READY" or scale is None else norms / scale
