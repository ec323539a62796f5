"""Validate and save the average that a schedule-free optimizer keeps, and train on with the weights from before."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, only_warn, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.objects import unwrapped
from lightning_tricks._trainer.refusals import DDP_OR_FSDP2, NOT_OURS, Refusal
from lightning_tricks._trainer.saves import around_saves
from lightning_tricks.guards.averages import WeightAverage
from lightning_tricks.optim import check_constant, schedule_free_parts
from lightning_tricks.optim.keep_settings_on_load import layers_of
from lightning_tricks.optim.schedule_free import has_trained_weights, put_average, put_trained_weights
from lightning_tricks.parallel.shard import drop_gathered
from lightning_tricks.schedules import ScheduleLR

__all__ = ["ScheduleFree"]

_REFUSED = Refusal(
    NOT_OURS, f"{{strategy}} keeps weights in a form that cannot be exchanged for their average: {DDP_OR_FSDP2}"
)


class ScheduleFree(pl.Callback):
    """Puts the average of a schedule-free optimizer in the place of the weights wherever they are evaluated or saved;
    training itself stays as it is to the bit.

    An optimizer such as `schedulefree.AdamWScheduleFree` trains one set of weights, and the model is the average of
    another. Without this callback it fails at its first step, because nobody calls its `train`. `LanguageModel` brings
    the callback along where its optimizer is schedule-free.

    The parameters hold the average in validations, from the sanity check on, in each checkpoint, by whatever callback,
    and after the end of the fit, also after an exception; in training they hold the weights that are trained. These
    are kept while the average is in their place, and come back to the bit, so neither validations nor saves change a
    run. A checkpoint has the average as `state_dict`, for any program, and the weights that are trained in the
    optimizer's state: a resume goes on to the bit. One that was saved without them goes on with what the optimizer
    computes.

    The learning rate is constant after its warmup, by the optimizer's own `warmup_steps` or by `WarmupConstant`.

    Raises:
        UsageError: when the fit starts: no optimizer is schedule-free; a schedule that decays; weights that are not in
            fp32 or fp64, whose average would stand still; EMA or TailAverage beside it; DeepSpeed, FSDP1 or Lightning's
            ModelParallelStrategy.

    Source: Defazio et al. 2024, https://arxiv.org/abs/2405.15682, and https://github.com/facebookresearch/schedule_free
        ("How to Use": eval mode when storing checkpoints).
    """

    switches_schedule_free = True  # OptimizerMixin asks for this

    def __init__(self) -> None:
        self._parts: list[Any] = []  # schedule-free optimizers of the running fit
        self._module: Any = None
        self._saves = ExitStack()

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Refuse what no command has refused; begin anew."""
        self.check_run(trainer, None, stage)
        if stage == "fit":
            self._saves.close()  # of a fit that failed
            self._parts = []

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse strategies that keep weights in another form, and a second average, before any process is started."""
        if stage != "fit":
            return
        _REFUSED.check(trainer.strategy, "ScheduleFree:")
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAverage):
                raise UsageError(
                    f"{type(callback).__name__}: a schedule-free optimizer averages the weights already: remove "
                    f"{type(callback).__name__}"
                )

    @staticmethod
    def parts_of(optimizers: Sequence[Any]) -> list[Any]:
        """The schedule-free ones among optimizers and their parts; OptimizerMixin asks before the launch.

        Raises:
            UsageError: there is none.
        """
        if not (parts := _parts(optimizers)):
            found = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise UsageError(
                f"ScheduleFree: the optimizer is {found}: take schedulefree.AdamWScheduleFree, or remove the callback"
            )
        return parts

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the schedule-free optimizers, and refuse what they cannot train."""
        self._module = pl_module
        self._parts = self.parts_of([unwrapped(optimizer) for optimizer in trainer.optimizers])
        _check_dtypes(self._parts)
        _check_schedules(trainer)
        if any(getattr(part, "running_mean", None) is not None for part in pl_module.modules()):
            rank_zero_warn(
                "ScheduleFree: the running statistics of batch norm are those of the weights that are trained, not of "
                "their average: validation is worse than the model unless they are computed again"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the weights that are trained in place, and let each save take the average from now on."""
        self._train()
        self._saves.enter_context(around_saves(trainer, during_save=self._average_in_place))
        names = ", ".join(type(part).__name__ for part in self._parts)
        rank_zero_info(f"ScheduleFree: validation and checkpoints have the average of {names} as the weights")

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        was_training = any(map(has_trained_weights, self._parts))
        self._evaluate()
        try:
            yield
        finally:
            if was_training:
                self._train()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the average in place; it stays for what other callbacks do after the validation."""
        self._evaluate()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Put the weights that are trained back after a validation, or after a checkpoint was loaded."""
        self._train()

    def after_rollback(self) -> None:
        """Train on from a checkpoint to which SpikeRollback has gone back."""
        self._train()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave the average in the module."""
        self._evaluate()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Leave the average in the module, for those who save it now."""
        with only_warn("ScheduleFree: the average was not put in place"):
            self._evaluate()
        self._end()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Give the Trainer its own save back."""
        self._evaluate()
        self._end()

    def _end(self) -> None:
        self._saves.close()
        self._parts, self._module = [], None

    def _evaluate(self) -> None:
        if any(map(has_trained_weights, self._parts)):
            drop_gathered(self._module)
            for part in self._parts:
                put_average(part)

    def _train(self) -> None:
        if not all(map(has_trained_weights, self._parts)):
            drop_gathered(self._module)
            for part in self._parts:
                put_trained_weights(part)


def _check_dtypes(parts: Sequence[Any]) -> None:
    for part in parts:
        for group in part.param_groups:
            for index, param in enumerate(group["params"]):
                if param.dtype not in (torch.float32, torch.float64):
                    name = group.get("param_names", {index: f"number {index} of a group"})[index]
                    raise UsageError(
                        f"{type(part).__name__}: parameter '{name}' is {str(param.dtype).removeprefix('torch.')}, in "
                        "which an average over many steps does not change: train fp32 weights, as with the plugin "
                        "BF16Mixed"
                    )


def _parts(optimizers: Sequence[Any]) -> list[Any]:
    layers = [layer for optimizer in optimizers for layer in layers_of(optimizer)]
    return [part for layer in layers for part in schedule_free_parts(layer)]


def _check_schedules(trainer: Any) -> None:
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if isinstance(scheduler, ScheduleLR):
            check_constant(scheduler.optimizer, scheduler.group_curves)
        elif _parts([unwrapped(scheduler.optimizer)]):
            rank_zero_warn(
                f"ScheduleFree: {type(scheduler).__name__} sets the learning rate: a schedule-free optimizer wants a "
                "constant one after the warmup"
            )
