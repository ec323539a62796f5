"""Skip the optimizer steps that would do harm: not finite, or far above the steps before.

A step is judged on the device, in the moment between the clip and the optimizer, and nothing waits for the answer: the
optimizer's kernel reads it there. The host hears of it with the values of the logging interval.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import gather
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import local, where_read
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import logging_step
from lightning_tricks._trainer.objects import optimizer_index, unwrapped
from lightning_tricks._trainer.refusals import GRADIENT_NORM, Refusal
from lightning_tricks._trainer.run_facts import enabled_scaler, is_alone, step_samples, weights_layout
from lightning_tricks.guards.judging import Batch, Judgement, JudgementKeys, SkippedSteps, any_rank
from lightning_tricks.guards.outlier_window import OutlierWindow
from lightning_tricks.metrics.metric_buffer import MetricBuffer, OverRanks
from lightning_tricks.optim import skips_on_device
from lightning_tricks.optim.grad_scaler import add_overflow, refuse_scaled
from lightning_tricks.optim.keep_settings_on_load import layers_of, options_of, parts_of

__all__ = ["StepGuard"]

_REFUSED = Refusal(
    ("foreign engine",),
    "{strategy} leaves clip and step to DeepSpeed's engine, which asks nobody in between: take "
    "DeepSpeedZeROStrategy, or leave StepGuard out",
)


def skipping(optimizer: Any, scaler: Any, skip: Tensor) -> AbstractContextManager[Any]:
    """Let the step that `optimizer` makes inside the `with` change nothing if `skip` is 1, and be as usual if it is 0.

    Args:
        optimizer: unwrapped; its gradients are ready.
        scaler: the GradScaler of fp16, which has unscaled them, and which skips the step as one that overflowed; None
            without one.
        skip: 0-dim fp32 tensor on any device, 0 or 1. It is read on the host only for gradients on the host, and for
            optimizers that cannot decide on the device: they lose their gradients, and skip parameters that have none.
            The counts that some keep in their groups stay as they are.
    """
    if scaler is not None:
        add_overflow(scaler, optimizer, skip)
    elif skips_on_device(optimizer):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return replaced(optimizer, "found_inf", where_read(skip, gradients))
    elif bool(skip):
        optimizer.zero_grad(set_to_none=True)
        return _same_counts(optimizer)
    return nullcontext()


@contextmanager
def _same_counts(optimizer: Any) -> Iterator[None]:
    """Undo what the next step changes in the optimizer's groups: counts, such as those of schedule-free optimizers.

    It is undone at the end of the step, before anybody saves it; later steps count. What recipe and schedule set stays
    theirs.
    """
    own = options_of(parts_of(optimizer)) | {"params", "lr", "initial_lr", "weight_decay"}
    before = [{key: value for key, value in group.items() if key not in own} for group in optimizer.param_groups]

    def undo(*_: Any) -> None:
        for group, counts in zip(optimizer.param_groups, before, strict=True):
            group.update(counts)
            counts.clear()

    hook = optimizer.register_step_post_hook(undo)
    try:
        with replaced(optimizer, "skips_step", True):  # for others that follow its steps
            yield
    finally:
        hook.remove()


class StepGuard(pl.Callback):
    """Changes training: a step whose loss or gradient norm is out of bounds leaves weights, optimizer and buffers as
    they were before it.

    Out of bounds is a value that is NaN or infinite, or that exceeds the mean of the last `window_steps` accepted steps
    by more than `sigmas` standard deviations. Skipped steps never enter that mean. The guard judges the loss of the
    step over all ranks, and the norm of all gradients before the clip; a step that one rank rejects is
    skipped by all. The schedule, the data and the step counters go on. Each skipped step is named in one line at the
    next log step, with its values, its limit and the sample positions of its batch; `guard/skipped_steps` is the number
    since the run began.

    Buffers, such as BatchNorm's running statistics, are put back on the device to their values from before the forward
    passes of the step: see `KeptBuffers`.

    Fused Adam and AdamW and this collection's Muon skip on the device. Other optimizers cost one read of the device a
    step. Under fp16 with a loss scale a skipped step counts as an overflow, which halves the scale,
    and overflows are left to the scaler; `16-true` has none, and its steps are judged as those of other precisions.

    Args:
        sigmas: standard deviations above the mean at which a value is out of bounds; above 0.
        norm_ratio: a gradient norm must also exceed so many times the largest one of the window: norms of healthy steps
            have long tails, and the clip tames them. 0: the rule of `sigmas` alone.
        window_steps: accepted steps over which mean and deviation are taken.
        active_after_steps: accepted steps before finite values can be out of bounds.
        max_skipped_steps: the run stops when so many steps in a row were skipped.

    Raises:
        UsageError: an option out of its range; when training starts, Lightning's own DeepSpeedStrategy, FSDP1, LBFGS or
            a fused optimizer under Lightning's fp16; in training, after `max_skipped_steps` skipped steps in a row.

    Source: 6 standard deviations of 128 steps: `SkipStepOptimizer` of OLMo-core, see `OutlierWindow`.
    """

    def __init__(
        self,
        sigmas: float = 6.0,
        norm_ratio: float = 10.0,
        window_steps: int = 128,
        active_after_steps: int = 64,
        max_skipped_steps: int = 10,
    ) -> None:
        if not sigmas > 0:
            raise UsageError(f"StepGuard.sigmas={sigmas}: give a number of standard deviations above 0, such as 6")
        if not norm_ratio >= 0:
            raise UsageError(f"StepGuard.norm_ratio={norm_ratio}: give a number from 0 on; 0 leaves sigmas alone")
        if window_steps < 2 or not 2 <= active_after_steps <= window_steps:
            raise UsageError(
                f"StepGuard: window_steps={window_steps}, active_after_steps={active_after_steps}: a deviation needs 2 "
                "steps, and the window must hold active_after_steps"
            )
        if max_skipped_steps < 1:
            raise UsageError(f"StepGuard.max_skipped_steps={max_skipped_steps}: give 1 or more")
        self.sigmas, self.norm_ratio = sigmas, norm_ratio
        self.window_steps, self.active_after_steps = window_steps, active_after_steps
        self.max_skipped_steps = max_skipped_steps
        self._loaded: dict[str, Any] = {}  # the state of a checkpoint, for the next fit
        self._replacements = ExitStack()  # until the batch ends
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one fit."""
        self._buffers: KeptBuffers | None = None  # from the start of training on
        self._windows: list[OutlierWindow] = []  # of each optimizer
        self._skipped = SkippedSteps(self.max_skipped_steps)

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a strategy, before any process is started."""
        if stage == "fit":
            _refuse_strategy(trainer)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Drop the state of a checkpoint that was validated before this fit."""
        if stage == "fit":
            self._loaded = {}

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a run whose steps cannot be skipped; find the buffer."""
        _refuse_strategy(trainer)
        refuse_lbfgs(trainer, "StepGuard")
        self._reset()
        self._scaler = enabled_scaler(trainer.precision_plugin)
        self._has_engine = weights_layout(trainer.strategy) == "engine"
        self._others_skip = self._scaler is not None or (self._has_engine and str(trainer.precision).startswith("16"))
        self._over_ranks: OverRanks | None = None if is_alone(trainer) else "max"
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(lambda rows: self._skipped.report(rows))
        self._loss = self._buffer.step_loss()
        self._loss.keep()
        if not self._has_engine:
            self._buffer.step_norm().at_step(partial(self._judge_step, trainer, pl_module))
        device = trainer.strategy.root_device
        settings = (0.0, self.norm_ratio), self.window_steps, self.active_after_steps, self.sigmas, device
        self._windows = [OutlierWindow(*settings) for _ in trainer.optimizers]
        self._batch_idx = 0

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Go on with a checkpoint's windows and counts, which some strategies load after `on_fit_start`."""
        ranks, self._loaded = self._loaded.get("ranks", []), {}
        counts = [[0.0, 0.0] for _ in self._windows]
        if ranks:
            own = ranks[trainer.global_rank if trainer.global_rank < len(ranks) else 0]
            for index, (window, state) in enumerate(zip(self._windows, own, strict=False)):
                window.load_state_dict(state)
                counts[index] = state["counts"]
        self._skipped = SkippedSteps(self.max_skipped_steps, counts)
        self._buffers = KeptBuffers(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Keep the buffers."""
        self._batch_idx = batch_idx
        if self._buffers is not None and not self._loss.pending:  # else it is a further micro-batch of a step
            self._buffers.save()

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Stop after too many skips."""
        if self._skipped.reason_to_stop:  # not before: when a batch starts, SpikeRollback may bring the run back
            raise UsageError(self._skipped.reason_to_stop)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """Have DeepSpeed's engine ask for the judgement; refuse gradients that are still scaled."""
        if self._has_engine:
            index, strategy = optimizer_index(trainer, optimizer), cast(Any, trainer.strategy)

            def veto(norm: Tensor) -> bool:
                return bool(self._judge(trainer, index, norm))

            self._replacements.enter_context(strategy.step_with_veto(veto))
            return
        refuse_scaled(self._scaler, unwrapped(optimizer), "StepGuard", trainer.precision)

    def _judge_step(self, trainer: Any, pl_module: Any, optimizer: Any, norm: Tensor) -> None:
        """Judge the step that comes next, behind its clip."""
        index = optimizer_index(trainer, optimizer)
        skip = self._judge(trainer, index, norm)
        if self._buffers is not None and not pl_module.automatic_optimization:
            self._buffers.save()  # the next step may begin in the same batch
        self._replacements.enter_context(skipping(unwrapped(optimizer), self._scaler, skip))

    def _judge(self, trainer: Any, index: int, norm: Tensor) -> Tensor:
        """1.0 if the step of an optimizer that comes now is to be skipped, else 0.0: 0-dim, on the device."""
        window = self._windows[index]
        several = self._over_ranks is not None
        judged = Judgement(self._loss.take(), norm, window.limits, several, overflows=self._others_skip)
        skip = any_rank(~judged.good, several)
        if self._buffers is not None:
            self._buffers.put_back(skip)
        accepted = skip == 0 if several else judged.good
        if self._loss.known:  # else the norms alone are judged
            accepted = accepted & judged.counted
        window.accept(judged.values, accepted if judged.finite is None else accepted & judged.finite)
        batch = Batch(step_samples(trainer), trainer.current_epoch, self._batch_idx)
        keys = self._skipped.note(logging_step(trainer), index, skip, judged, batch)
        if trainer.log_every_n_steps:
            self._record(trainer, keys, judged, skip)
        else:
            self._skipped.count_unheard()
        return skip

    def _record(self, trainer: Any, keys: JudgementKeys, judged: Judgement, skip: Tensor) -> None:
        """Let the buffer keep what the report needs of other ranks, and what tells whether there is one."""
        self._buffer.record(keys.skipped, skip)
        if self._over_ranks is not None:
            rank, out = judged.out_of_bounds(trainer.global_rank)
            self._buffer.record_all(keys.values, out, self._over_ranks)
            self._buffer.record(keys.rank, rank, self._over_ranks)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Put back the module's and the optimizer's attributes."""
        self._replacements.close()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put back the module's and the optimizer's attributes."""
        self._replacements.close()
        self._buffers = None

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Free the copies of buffers."""
        self._buffers = None

    def after_rollback(self) -> None:
        """Count the skipped steps in a row anew: SpikeRollback has put earlier weights and buffers back."""
        if self._buffers is not None:
            self._buffers.save()
        self._skipped.after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """The windows and the counts of every rank; every rank must call."""
        if not self._windows:
            return self._loaded
        counts = self._skipped.counts() or [[0.0, 0.0] for _ in self._windows]
        own = [{**window.state_dict(), "counts": count} for window, count in zip(self._windows, counts, strict=True)]
        return {"ranks": gather(own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them in the next fit."""
        self._loaded = state_dict


def _refuse_strategy(trainer: Any) -> None:
    GRADIENT_NORM.check(trainer.strategy, "StepGuard:")
    _REFUSED.check(trainer.strategy, "StepGuard:")


def refuse_lbfgs(trainer: Any, who: str) -> None:
    """Refuse a run with LBFGS, also inside another optimizer."""
    layers = [layer for optimizer in trainer.optimizers for layer in layers_of(unwrapped(optimizer))]
    if any(isinstance(layer, torch.optim.LBFGS) for layer in layers):
        raise UsageError(f"{who}: LBFGS computes several losses a step; take {who} out, or use AdamW")


# ---- the buffers of a module


class KeptBuffers:
    """Copies of a module's buffers, such as running statistics, counts of batches and codebooks.

    A skipped step leaves the weights alone, but its forward pass has already changed the buffers: one NaN in a batch
    makes BatchNorm's running mean NaN for good.

    Left alone are buffers that cannot be written from a copy (lazy, sparse, quantized, expanded, made in inference
    mode), and those whose shape changes within the step, such as a cache that grows.

    Args:
        module: on its device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(name, layer._buffers) for name, layer in module.named_modules() if layer._buffers]
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(self) -> None:
        """Copy the buffers: before the first forward pass of a step."""
        before, self._copies = self._copies, {}
        for place, buffer in self._buffers():
            copy = before.get(place)
            self._copies[place] = copy.copy_(buffer) if copy is not None and _alike(copy, buffer) else buffer.clone()

    def put_back(self, skip: Tensor) -> None:
        """Put the copies back if `skip`, a 0-dim tensor, is not 0. Does not wait for the device."""
        for place, buffer in self._buffers():
            copy = self._copies.get(place)
            if copy is not None and _alike(copy, buffer):
                torch.where(skip.to(buffer.device) != 0, copy, buffer, out=buffer)

    def _buffers(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """This process's numbers of each buffer that can be written from a copy, in its memory.

        Autograd knows nothing of them, so a write does not count as one to the buffer: graphs that have saved it can
        still run backward.
        """
        for layer, buffers in self._owners:
            for name, tensor in buffers.items():
                if tensor is not None and can_be_copied(tensor):
                    yield (layer, name), local(tensor).data


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def can_be_copied(tensor: Any) -> bool:
    """Whether a buffer can be written from a copy; see `KeptBuffers`."""
    if is_lazy(tensor) or tensor.is_inference() or tensor.layout != torch.strided or tensor.is_nested:
        return False
    part = local(tensor)
    expanded = any(size > 1 and stride == 0 for size, stride in zip(part.shape, part.stride(), strict=True))
    return type(part) is Tensor and part.numel() > 0 and not (part.is_meta or part.is_quantized or expanded)
