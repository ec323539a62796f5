"""Log the gradient norm before the clip, as the clip itself computes it: no second pass over the gradients."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import check_choice
from lightning_tricks._core.find_modules import clean_name, find_blocks, parameters_by_name, whole_of
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks._trainer.objects import optimizer_index
from lightning_tricks._trainer.refusals import GRADIENT_NORM, UNREADABLE, Refusal
from lightning_tricks._trainer.run_facts import weights_layout
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.optim import grad_norms_of

__all__ = ["GradNormMonitor"]

_REFUSED = Refusal(UNREADABLE, "under {strategy}, which holds no parameter whole: leave it out, or use FSDP2Strategy")

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


def parameters_by_block(module: nn.Module, parameters: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """`parameters` by the repeated block that holds them; else by the largest module that holds them and no block.

    Of a pipeline stage: the parts of the whole model, of which some are empty.
    """
    wanted, whole = {id(parameter) for parameter in parameters}, whole_of(module)
    blocks, here = list(find_blocks(whole)), parameters_by_name(module)
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in whole.named_parameters():
        own = here.get(clean_name(name))
        if whole is module and id(parameter) not in wanted:
            continue
        words = clean_name(name).split(".")
        paths = [".".join(words[:end]) for end in range(1, len(words) + 1)]
        candidates = (p for p in paths if p in blocks or not any(block.startswith(f"{p}.") for block in blocks))
        part = parts.setdefault(next(candidates), [])
        if id(own) in wanted:
            part.append(own)  # type: ignore[arg-type]
    return parts


class GradNormMonitor(pl.Callback):
    """Record `train/grad_norm` of every optimizer step, before the clip. Never changes training.

    The L2 norm of all gradients of the optimizer, of the whole accumulated batch, unscaled under fp16, over all ranks
    and shards (DDP, FSDP2, tensor parallelism; DeepSpeed's is read from its engine). Each interval's last step
    also gets `train/clipped_fraction` and `train/nonfinite_grad_norms`. With several optimizers the names are
    `train/grad_norm/0`, `train/grad_norm/1` and so on, without those two.

    It is measured once for all who ask: in automatic optimization before the module's own
    `on_before_optimizer_step` and the clip, in manual optimization before the last `self.clip_gradients(...)` of a
    step, or, without one, as the step finds the gradients. Where one optimizer steps several times in a batch, or asks
    for several gradients (LBFGS), the largest norm of the batch is recorded.

    Args:
        per: also record, on log steps, `grad_norms/<name>` of each block of the model (`block`) or of each parameter
            group of the optimizer (`group`); one more pass over the gradients on those steps.

    Raises:
        UsageError: FSDP1; `per` under DeepSpeed, which holds no parameter whole; in training, sparse gradients.

    Source: Pascanu et al. 2012, https://arxiv.org/abs/1211.5063.
    """

    def __init__(self, per: Parts | None = None) -> None:
        if per is not None:
            check_choice("per", per, Parts, ", or none")
        self.per = per
        self._parts: Measured = {}  # of the step
        self._largest: Measured = {}  # of the batch

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse strategies under which the norms are not known, before any process is started."""
        if stage != "fit":
            return
        GRADIENT_NORM.check(trainer.strategy, "GradNormMonitor:")
        if self.per:
            _REFUSED.check(trainer.strategy, f"GradNormMonitor: per={self.per!r}")

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse it where no command has; find the buffer."""
        self.check_run(trainer, None, "fit")
        self._has_engine = weights_layout(trainer.strategy) == "engine"
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(partial(self._of_interval, trainer))
        if not self._has_engine:
            parts = partial(self._measure_parts, trainer, pl_module) if self.per else None
            self._buffer.step_norm().at_step(partial(self._record, trainer), parts)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """No step of the batch is made yet."""
        self._largest.clear()

    def _measure_parts(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self._buffer.is_log_step():
            return
        groups = optimizer.param_groups
        if self.per == "block":
            parts = parameters_by_block(pl_module, [parameter for group in groups for parameter in group["params"]])
        else:
            parts = {group.get("name", str(i)): group["params"] for i, group in enumerate(groups)}
        norms = self._buffer.step_norm().unscaled(grad_norms_of(list(parts.values())), optimizer)
        self._parts = {tuple(f"grad_norms{self._suffix(trainer, optimizer)}/{name}" for name in parts): norms}

    def _suffix(self, trainer: Any, optimizer: Any) -> str:
        return f"/{optimizer_index(trainer, optimizer)}" if len(trainer.optimizers) > 1 else ""

    def _record(self, trainer: Any, optimizer: Any, norm: Tensor) -> None:
        """Record the norms of a step, or what is larger of them and of those of earlier steps of the batch."""
        measured, self._parts = {(f"train/grad_norm{self._suffix(trainer, optimizer)}",): norm, **self._parts}, {}
        for names, norms in measured.items():
            earlier = self._largest.get(names)
            self._largest[names] = norms if earlier is None else torch.maximum(earlier, norms)  # NaN stays
            self._buffer.record_all(names, self._largest[names])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Under DeepSpeed, ask its engine for the norm."""
        if self._has_engine and not is_accumulating(trainer):
            engine: Any = trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
            if (norm := engine.get_global_grad_norm()) is not None:
                self._buffer.record("train/grad_norm", norm)

    def _of_interval(self, trainer: Any, rows: list[Row]) -> dict[str, float]:
        norms = [row.values["train/grad_norm"] for row in rows if "train/grad_norm" in row.values]
        limit = trainer.gradient_clip_val if self._has_engine else self._buffer.step_norm().limit
        return interval_figures(norms, limit) if norms else {}
