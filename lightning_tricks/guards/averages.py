"""EMA and TailAverage keep an average of the weights beside them, and validate with it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, only_warn, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.refusals import DDP_OR_FSDP2, NOT_OURS, Refusal
from lightning_tricks._trainer.saves import around_saves
from lightning_tricks.checkpoints.open_checkpoint import AVERAGES, BLEND, MEAN
from lightning_tricks.guards.averaged_weights import AveragedWeights, Swap
from lightning_tricks.parallel.shard import drop_gathered

__all__ = ["EMA", "TailAverage"]

_REFUSED = Refusal(NOT_OURS, f"{{strategy}} keeps weights in a form that cannot be averaged and saved: {DDP_OR_FSDP2}")

_RUNNING = "running"


class WeightAverage(pl.Callback):
    """Base of the callbacks that average the weights; a subclass says how, by `begin` and `advance`.

    Attributes:
        NAME: of the average in checkpoints and metrics.
        weights: what is averaged; None before a run.
        terms: averages by kind, each with a tensor for each of `weights.tensors`; MEAN takes the weights' place.
        step: `trainer.global_step` when the average last moved.
    """

    NAME: ClassVar[str]

    def __init__(self, validate: bool, blend: float) -> None:
        if not 0 < blend <= 1:
            raise UsageError(f"{type(self).__name__}: blend={blend}: give a share of the average above 0, at most 1")
        self.validate, self.blend = validate, blend
        self._swapped = ExitStack()
        self._trainer: Any = None
        self._reset()

    def _reset(self) -> None:
        self.weights: AveragedWeights | None = None
        self.terms: dict[str, list[Tensor]] = {}
        self.step = 0
        self._loaded: dict[str, Any] | None = None
        self._was_rolled_back = False  # from a copy in memory

    # ---- for subclasses

    @abstractmethod
    def begin(self) -> None:
        """Set `terms` for a run that begins."""

    @abstractmethod
    def advance(self, trainer: Any) -> None:
        """Take in the weights as they are after `trainer.global_step`; `step` is still that of the last time."""

    def progress(self) -> dict[str, Any]:
        """The counters that a resume needs, in a checkpoint."""
        return {"step": self.step}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on with the counters of a checkpoint."""
        self.step = progress["step"]

    # ---- the average along the run

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse strategies and callbacks with which wrong weights would be averaged or validated.

        The command line calls it before any process is started.
        """
        name, callbacks = type(self).__name__, trainer.callbacks
        _REFUSED.check(trainer.strategy, f"{name}:")
        for other in [other for other in callbacks if isinstance(other, WeightAverage) and other is not self]:
            if other.NAME == self.NAME:
                raise UsageError(f"{name}: the Trainer has two, whose averages would have one name: remove one")
            if self.validate and other.validate:
                raise UsageError(
                    f"{name}: validate=True, and {type(other).__name__} would validate with its average too: set "
                    "validate of one of them to False"
                )

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse the same where no command has; begin anew."""
        self.check_run(trainer, None, stage)
        if stage == "fit":
            self._reset()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Keep the average until the weights have their device and dtype."""
        self._loaded = (checkpoint.get(AVERAGES) or {}).get(self.NAME)
        if self._loaded is None:
            begins = "it begins with the weights" if trainer.state.fn == "fit" else "the weights are taken as they are"
            rank_zero_warn(f"{type(self).__name__}: the checkpoint {trainer.ckpt_path} holds no average: {begins}")

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin the average, or go on with the one of the checkpoint."""
        self._trainer = trainer
        saved, self._loaded = self._loaded, None
        for key, parameter in pl_module.named_parameters():
            if is_lazy(parameter):
                raise UsageError(
                    f"{type(self).__name__}: {key} has no size yet (a lazy module): send one batch through the module "
                    "in its constructor or in configure_model"
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise UsageError(f"{type(self).__name__}: {key} is complex: hold its two parts in real parameters")
        if saved is not None:
            self._restore(trainer, pl_module, saved)
        else:
            drop_gathered(pl_module)  # a sanity check may have left parameters gathered
            self.weights, self.step = AveragedWeights(pl_module), trainer.global_step
            self.begin()
        rank_zero_info(self._summary())

    def _restore(self, trainer: Any, module: nn.Module, saved: Mapping[str, Any]) -> None:
        drop_gathered(module)
        self.weights = AveragedWeights(module, {name for term in saved["weights"].values() for name in term})
        self.terms = {term: self.weights.load(value, trainer.ckpt_path) for term, value in saved["weights"].items()}
        self.load_progress(saved["progress"])

    def _summary(self) -> str:
        assert self.weights is not None
        taken = "it" if self.blend == 1 else f"{self.blend:g} of it and {1 - self.blend:g} of the weights"
        used = f"validation, test and predict take {taken}" if self.validate else "it is only saved"
        return (
            f"{type(self).__name__}: averages {len(self.weights.tensors):,} weights, in {len(self.terms)} x "
            f"{self.weights.nbytes / 2**30:.3f} GiB a process; {used}"
        )

    def rollback_state(self) -> dict[str, Any] | None:
        """The average beside the weights as they are, for SpikeRollback's copy."""
        if self.weights is None:
            return None
        self._catch_up(self._trainer)
        return {"terms": self.terms, "progress": self.progress()}

    @torch.no_grad()
    def load_rollback_state(self, state: dict[str, Any] | None) -> None:
        """Bring the average back that stood beside the weights that came back."""
        if self.weights is None or state is None:
            return
        for name, average in self.terms.items():
            copied = state["terms"][name]
            if number := len(average) - len(copied):  # unfrozen since then: until then each was its own average
                copied = [*copied, *self.weights.copies(number)]
            torch._foreach_copy_(average, copied)
        self.load_progress(state["progress"])
        self._was_rolled_back = True

    def load_rollback_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the average of a checkpoint to which SpikeRollback goes back."""
        self._loaded = (checkpoint.get(AVERAGES) or {}).get(self.NAME)

    def after_rollback(self) -> None:
        """Go on from now with the average that came back, or anew with the weights where none was kept.

        The steps since then are in no average: they are undone, and one NaN among them would stay in it for ever.
        """
        if self.weights is None:
            return
        saved, self._loaded = self._loaded, None
        now = self.step = self._trainer.global_step  # this step's weights are in it, wherever the two callbacks stand
        if saved is not None:
            self._restore(self._trainer, self._trainer.lightning_module, saved)
        elif not self._was_rolled_back:
            self.begin()
        self.step, self._was_rolled_back = now, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Average weights as well that a finetuning has unfrozen at the start of this epoch."""
        if self.weights is None or batch_idx:
            return
        drop_gathered(pl_module)  # a validation may have left parameters gathered
        if number := self.weights.find():
            for average in self.terms.values():
                average += self.weights.copies(number)  # as long as they were frozen, their average was what they are

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take in the weights, if an optimizer has stepped in this batch."""
        self._catch_up(trainer)

    def _catch_up(self, trainer: Any) -> None:
        if self.weights is not None and trainer.global_step != self.step:
            self.advance(trainer)
            self.step = trainer.global_step

    # ---- in a checkpoint

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Add the average, beside the weights that are trained."""
        if self.weights is None:
            if self._loaded is not None:  # of a run that has nothing left to train
                checkpoint.setdefault(AVERAGES, {})[self.NAME] = self._loaded
            return
        if trainer.state.fn == "fit":
            self._catch_up(trainer)  # a callback in front of this one may save
        checkpoint.setdefault(AVERAGES, {})[self.NAME] = {
            "weights": {term: self.weights.by_name(average) for term, average in self.terms.items()},
            "progress": self.progress(),
            BLEND: self.blend,
        }

    # ---- in the place of the weights

    def _enter(self, trainer: Any, module: Module) -> None:
        if not self.validate or trainer.sanity_checking:
            return
        if self._loaded is not None and trainer.state.fn != "fit":
            saved, self._loaded = self._loaded, None
            self._restore(trainer, module, saved)
        if self.weights is not None and self.weights.module is module:
            self._swapped.enter_context(self._in_place(trainer, self.weights))

    @contextmanager
    def _in_place(self, trainer: Any, weights: AveragedWeights) -> Iterator[None]:
        """Have the average, as `blend` says, in the place of the weights, except while a checkpoint is saved."""
        swap = Swap(weights, self.terms[MEAN], self.blend)

        @contextmanager
        def weights_back() -> Iterator[None]:
            swap.leave()
            try:
                yield
            finally:
                swap.enter()

        try:
            swap.enter()
            with around_saves(trainer, during_save=weights_back):
                yield
        finally:
            swap.leave()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in the place of the weights."""
        self._enter(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Log the share of the average in the weights that were validated or tested."""
        if not trainer.sanity_checking and self.validate:
            in_place = self.weights is not None and self.weights.module is pl_module
            stage = "test" if trainer.testing else "val"
            pl_module.log(f"{stage}/{self.NAME}_share", self.blend if in_place else 0.0, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights back."""
        self._swapped.close()

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put the weights back."""
        with only_warn(f"{type(self).__name__}: the weights were not put back"):
            self._swapped.close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Put the weights back."""
        self._swapped.close()


def decay_at(update: int, decay: float, warmup: bool) -> float:
    """The decay of update number `update`, counted from 0.

    With `warmup` it is min(decay, (1 + update) / (10 + update)): 0.1 at the first update, `decay` from update
    (10 * decay - 1) / (1 - decay) on, which is 8,990 for 0.999.

    Source: `num_updates` of https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    return min(decay, (1 + update) / (10 + update)) if warmup else decay


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, and has validation, test and predict use it; training itself
    stays as it is to the bit.

    After each optimizer step: average = decay * average + (1 - decay) * weights. The average begins as the weights
    before the first step. Where the weights are in shards (`FSDP2Strategy`), each process averages its own; nothing is
    gathered. Averages of bf16 weights are in fp32. Weights that a finetuning unfreezes at the start of an epoch, as
    BackboneFinetuning does, are averaged from then on. A step that a guard has skipped leaves the weights unchanged;
    the average takes in the same weights once more, which does no harm.

    At the start of a validation the average and the weights change places, in the same memory, and at its end, or after
    an exception, they change back. `val/ema_share` is the share of the average in the weights of this validation: 1, or
    `blend`, and 0 where there was no average.

    With `blend` below 1, validation, test, predict and readers of the average take (1 - blend) * weights + blend *
    average of the same step. The average itself and a resume do not depend on it.

    Checkpoints hold the weights that are trained as `state_dict`, whenever they are saved, and the average beside them
    as `averages`, with `blend`, which the readers below follow. A resumed run goes on with it to the bit, also in
    folders of shards and with another number of processes. `generate --average ema`, `load_weights(...,
    average="ema")`, `InitFrom` and `LanguageModel.load_from_checkpoint` take it in place of the weights. A checkpoint
    of weights alone lacks it.

    Args:
        decay: share of the average that stays at each step. 0.999, as in Lightning's EMAWeightAveraging and in torch.
            An old step has lost half of its share after 0.69 / (1 - decay) steps.
        warmup: begin with a small decay, so that the first weights are soon forgotten, see `decay_at`.
        validate: whether validation, test and predict use the average; if not, it is kept and saved only.
        blend: share of the average in the weights that take their place, above 0. 1 is the average alone. The second
            source has 0.6, with a decay of 1 - 1 / 150.

    Raises:
        UsageError: an option out of range; DeepSpeed, FSDP1 or Lightning's ModelParallelStrategy; two of them in one
            Trainer, or beside a TailAverage if both validate; at a resume, an average of other weights.

    Source: Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; record 46 of
        https://github.com/KellerJordan/modded-nanogpt/blob/master/records/track_3_optimization/README.md.
    """

    NAME: ClassVar[str] = "ema"

    def __init__(self, decay: float = 0.999, warmup: bool = True, validate: bool = True, blend: float = 1.0) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"EMA: decay={decay}: give a number between 0 and 1, such as 0.999")
        super().__init__(validate, blend)
        self.decay, self.warmup = decay, warmup
        self._updates = 0  # of the average

    def begin(self) -> None:
        """Begin with the weights as they are."""
        assert self.weights is not None
        self.terms, self._updates = {MEAN: self.weights.copies()}, 0

    def advance(self, trainer: Any) -> None:
        """Move towards the weights."""
        assert self.weights is not None
        self.weights.move(self.terms[MEAN], 1 - decay_at(self._updates, self.decay, self.warmup))
        self._updates += 1

    def progress(self) -> dict[str, Any]:
        """The steps and updates so far."""
        return {**super().progress(), "updates": self._updates}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._updates = progress["updates"]


def window_end(step: int, max_steps: int, horizon_steps: int) -> int:
    """The end of the window in which a step lies, after it: windows end at `max_steps`, and every horizon before it.

    Args:
        step: number of optimizer steps done.
        max_steps: the run's last step; -1 or 0 where it has none, then windows are counted from step 0.
        horizon_steps: of a window.
    """
    return step + ((max(max_steps, 0) - step) % horizon_steps or horizon_steps)


class TailAverage(WeightAverage):
    """Keeps the mean of the weights over the last steps, and has validation, test and predict use it; training itself
    stays as it is to the bit.

    The steps are divided into windows of `horizon_steps`, the last of which ends with `max_steps`. The average is the
    mean over all steps of the last whole window; before the end of the first one it is the mean since the start. Memory
    is that of two averages, whatever the horizon.

    Where the run's end moves, as in a resume with another `max_steps`, the running window ends with a window of the new
    end: it is between half a window and one and a half, unless the run ends before that.

    Everything else is as in `EMA`: shards, fp32, exchange in place, checkpoints, `val/tail_average_share`. Its name in
    `generate --average` is `tail_average`.

    Args:
        horizon_steps: optimizer steps of a window, as `trainer.global_step` counts them; 500 is that of the source. For
            long runs about one percent of the steps.
        validate: whether validation, test and predict use the average; if not, it is kept and saved only.
        blend: as in `EMA`.

    Raises:
        UsageError: an option out of range; otherwise see `EMA`.

    Source: `WeightAverager` of https://github.com/epfml/schedules-and-scaling, for Haegele et al. 2024,
        https://arxiv.org/abs/2405.18392 (windows of 500 steps); Sanyal et al. 2023, https://arxiv.org/abs/2306.03241.
    """

    NAME: ClassVar[str] = "tail_average"

    def __init__(self, horizon_steps: int = 500, validate: bool = True, blend: float = 1.0) -> None:
        if horizon_steps < 1:
            raise UsageError(f"TailAverage: horizon_steps={horizon_steps}: give at least 1")
        super().__init__(validate, blend)
        self.horizon_steps = horizon_steps
        self._taken = self._windows = 0  # weights in the running window, windows that have ended
        self._begun = self._end = 0  # steps at which the running window begins and ends; no end is known yet

    def begin(self) -> None:
        """Begin with the weights as they are, which count until the first are taken in."""
        assert self.weights is not None
        self.terms = {MEAN: self.weights.copies(), _RUNNING: self.weights.copies()}
        self._taken = self._windows = self._end = 0
        self._begun = self.step

    def advance(self, trainer: Any) -> None:
        """Take in the weights, and end the window where it ends."""
        assert self.weights is not None
        self._plan(trainer.max_steps)
        self._taken += 1
        for kind in (_RUNNING, *([] if self._windows else [MEAN])):
            self.weights.move(self.terms[kind], 1 / self._taken)
        if (here := trainer.global_step) >= self._end:
            self.terms = {MEAN: self.terms[_RUNNING], _RUNNING: self.terms[MEAN]}
            self._begun, self._taken, self._windows = self._end, 0, self._windows + 1
            self._end = window_end(here, trainer.max_steps, self.horizon_steps)

    def _plan(self, max_steps: int) -> None:
        """Let the running window end with one of the run's windows, wherever the run's end is now."""
        end = window_end(self.step, max_steps, self.horizon_steps)
        if self._end == 0:
            self._end = end
        if (end - self._end) % self.horizon_steps == 0:
            return
        if 2 * (end - self._begun) < self.horizon_steps and (max_steps <= 0 or end < max_steps):
            end += self.horizon_steps
        self._end = end

    def progress(self) -> dict[str, Any]:
        """The steps, weights and windows so far."""
        window = {"begun": self._begun, "end": self._end}
        return {**super().progress(), "taken": self._taken, "windows": self._windows, **window}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting."""
        super().load_progress(progress)
        self._taken, self._windows = progress["taken"], progress["windows"]
        self._begun, self._end = progress["begun"], progress["end"]
