"""Give any LightningModule its optimizer and schedule: groups by role, a learning rate per step, a safe resume.

The schedule's length is that of the run: known at once from `max_steps`, from epochs or tokens when training starts.
Only then does the Trainer know its data and the position of a checkpoint; to ask earlier would start the loaders.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.run_facts import equal_replicas, weights_layout
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.checkpoints.check_checkpoint import check_training_state
from lightning_tricks.mixins._base import Mixin
from lightning_tricks.mixins._plain_settings import from_plain, rules_of, setting_of, shown, to_plain
from lightning_tricks.optim import (
    ComposedOptimizer,
    LayerwiseLRDecay,
    Muon,
    MuonAdamW,
    MuP,
    ParamRule,
    build_optimizer,
    check_constant,
    groups_table,
    schedule_free_parts,
)
from lightning_tricks.optim.build_optimizer import check_settings
from lightning_tricks.optim.decay_groups import expanded
from lightning_tricks.optim.freezing import freeze as freeze_parameters
from lightning_tricks.optim.keep_settings_on_load import parts_of
from lightning_tricks.optim.limits import Where, refuse_limits
from lightning_tricks.schedules import Schedule, ScheduleLR, WarmupConstant

__all__ = ["OptimizerMixin"]

# keys of a checkpoint
_FUNCTION_KEY = "optimizer_function"  # text of the function that made the optimizer
MUP_KEY = "mup"  # the parametrization of its weights
_FROZEN_KEY = "frozen"  # names of the parameters that `freeze` fitted
SCHEDULE_KEY = "schedule"  # the schedule that the run followed, and the run's length


class OptimizerMixin(Mixin):
    """Own `configure_optimizers`: parameter groups by role, the optimizer, and the schedule, set at every step.

    Put it before the LightningModule in the bases: `class Model(OptimizerMixin, LightningModule)`. The length of the
    run comes from `trainer.max_steps` or `trainer.max_epochs`, whichever ends first; it is read when training starts,
    so that no loader is started for it. A resume follows the settings given here, not the checkpoint's: learning rate,
    decay, betas, length and shape of the schedule. The groups are logged once, at start. Your own
    `configure_optimizers` calls `super().configure_optimizers()` or `make_optimizer`; else a line says that these
    settings have no effect.

    With `save_hyperparameters()`, a checkpoint holds schedule and rules in plain types: it opens with
    `weights_only=True`, and `load_from_checkpoint` builds them again. The option `optimizer` is a function, and a
    checkpoint holds only its name: to train the loaded module, give the function to `load_from_checkpoint`.

    What `freeze` fits has no gradient from `configure_model` on, before a strategy wraps or shards the module. A module
    that builds layers in its own `configure_model` calls `super().configure_model()` at its end.

    Under `fast_dev_run`, which replaces `max_steps`, the learning rate is constant: the run has no length to follow.

    Args:
        optimizer: makes the optimizer from parameter groups; None for AdamW with lr 3e-4, betas (0.9, 0.95), eps 1e-8.
        schedule: the learning rate's curve over the run; None for a constant learning rate.
        weight_decay: of matrices and embeddings; biases and norms never decay.
        decay_embeddings: whether embeddings decay with the matrices.
        param_rules: other learning rates, decays, betas, schedules or optimizers by name or role of a parameter; the
            first rule that fits counts.
        mup: the settings are those of a model of another width, and learning rates, decays and initial weights are
            scaled from it; see `MuP`. None: they are this model's.
        freeze: parameters that are not trained, as part of their names or by role: `[embed, role=norm]`; see
            `freeze` in optim/freezing.py. They stay as they were drawn or loaded.
        **kwargs: for the next class in the bases.

    Raises:
        UsageError: a setting of another kind than these. When training starts: see `build_optimizer` and
            `Schedule.check`; an optimizer that is known not to work under the strategy or precision; a callback that
            adds parameters in mid-run; a checkpoint that holds weights only, or the state of an optimizer of another
            class, or of other frozen parameters; at load, weights of another MuP. An error of `freeze`.

    Source: see `default_adamw` and `decay_groups`.
    """

    def __init__(
        self,
        *,
        optimizer: Callable[[Iterable], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
        weight_decay: float = 0.1,
        decay_embeddings: bool = True,
        param_rules: list[ParamRule | LayerwiseLRDecay] | None = None,
        mup: MuP | None = None,
        freeze: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if optimizer is not None and not callable(optimizer):
            raise UsageError(
                f"optimizer={shown(optimizer)}: give a function that makes it from the parameter "
                "groups, such as `lambda groups: torch.optim.AdamW(groups, lr=3e-4)`"
            )
        self.optimizer = optimizer
        self._missing_optimizer: str | None = None
        self.schedule: Schedule | None = schedule and setting_of(schedule, Schedule, "schedule")
        self.weight_decay = weight_decay
        self.decay_embeddings = decay_embeddings
        self.param_rules: list[ParamRule | LayerwiseLRDecay] | None = rules_of(param_rules)
        self.mup: MuP | None = mup and setting_of(mup, MuP, "mup")
        if freeze is not None and not isinstance(freeze, list | tuple):
            raise UsageError(f"freeze={shown(freeze)}: give a list of patterns, such as [embed]")
        self.freeze_patterns = freeze  # LightningModule has a method `freeze`
        self._frozen: list[str] = []  # the names that they fit
        self._optimizer_class: str | None = None
        self._class_in_checkpoint: str | None = None

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse wrong settings of the optimizer, or of the schedule for the length of the run.

        The command line calls it before the data are prepared; `stage` is `fit`, `validate`, `test` or `predict`.
        """
        if stage != "fit":
            return
        optimizer = check_settings(self.optimizer, self.mup)
        if optimizer is not None:
            _refuse_for_run(optimizer, trainer, self)
        for callback in trainer.callbacks if optimizer is not None and self.optimizer is not None else ():
            if hasattr(callback, "switches_schedule_free"):
                callback.parts_of([optimizer])
        rules = [rule for rule in self.param_rules or () if isinstance(rule, ParamRule)]
        if optimizer is not None and not any(rule.schedule for rule in rules):
            check_constant(optimizer, [self.schedule] * len(optimizer.param_groups))
        curves = [curve for rule in rules for curve in (rule.schedule, rule.decay_schedule)]
        if not getattr(trainer, "fast_dev_run", False):
            _check_length(trainer, datamodule, self, [curve for curve in (self.schedule, *curves) if curve is not None])

    def configure_model(self) -> None:
        """Freeze what `freeze` fits. A module that builds layers here calls it at its end."""
        super().configure_model()
        if self.freeze_patterns:
            self._frozen = freeze_parameters(self, self.freeze_patterns)

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit, whose optimizer may have been another one."""
        super().setup(stage)
        if stage == "fit":
            self._optimizer_class = self._class_in_checkpoint = None

    def make_optimizer(self, module: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of `module`, or of this module, by these settings; see `build_optimizer`."""
        settings = (self.optimizer, self.weight_decay, self.decay_embeddings, self.param_rules, self.mup)
        optimizer = build_optimizer(self if module is None else module, *settings)
        self._optimizer_class = _name_of(optimizer)
        self._check_optimizer_class()
        return optimizer

    def configure_optimizers(self) -> Any:
        """The optimizer, and the schedule stepped once after each of its steps."""
        if self.optimizer is None and self._missing_optimizer is not None:
            raise UsageError(
                f"optimizer: the checkpoint was trained with {self._missing_optimizer}, a function, which it cannot "
                "hold: to train, pass optimizer=... to load_from_checkpoint, or build a new module and give fit the "
                "ckpt_path"
            )
        if self.freeze_patterns and self._frozen != freeze_parameters(self, self.freeze_patterns):
            raise UsageError(
                f"freeze={self.freeze_patterns}: {type(self).__name__} makes parameters after they were to be frozen: "
                "let its configure_model call super().configure_model() at its end"
            )
        optimizer = self.make_optimizer()
        _refuse_for_run(optimizer, self.trainer, self)
        _refuse_finetuning(self.trainer)
        for part in parts_of(optimizer):
            if isinstance(part, Muon) and self.automatic_optimization:  # else gradients may differ in a step
                part.replicas = equal_replicas(self.trainer)
        self._refuse_missing_callback(optimizer)
        rank_zero_info(str(self._optimizer_class), *groups_table(optimizer.param_groups, lr=0.0).split("\n"))
        if self._frozen:
            rank_zero_info(f"frozen: {len(self._frozen)} tensors, such as {self._frozen[0]}")
        lrs, decays = _curves_of_groups(self, optimizer)
        if getattr(self.trainer, "fast_dev_run", False):  # it has replaced max_steps by its own
            return {"optimizer": optimizer}
        if not any((self.schedule, *lrs, *decays)):
            ScheduleLength.attach_to(self.trainer)
            return {"optimizer": optimizer}
        schedule = self.schedule or WarmupConstant(warmup_steps=0)
        ScheduleLength.attach_to(self.trainer)
        total = self.trainer.max_steps
        length_follows = total < 0 and _by_epochs(self.trainer)
        with _naming_option(self.trainer, total):
            scheduler = ScheduleLR(optimizer, schedule, None if length_follows else total, lrs, decays, length_follows)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Say in one line that an own `configure_optimizers` has left the settings out."""
        super().on_fit_start()
        if self._optimizer_class is None:
            rank_zero_warn(
                f"{type(self).__name__}.configure_optimizers takes the place of OptimizerMixin's, whose optimizer, "
                "schedule, weight_decay and param_rules have no effect: delete it, or let it call "
                "super().configure_optimizers() or self.make_optimizer()"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the optimizer's name and class, the running schedule, and the hyper-parameters in plain types."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["optimizer_class"] = self._optimizer_class
        if self._frozen:
            checkpoint[_FROZEN_KEY] = self._frozen
        if self.mup is not None:
            checkpoint[MUP_KEY] = to_plain(self.mup)
        running = [config.scheduler for config in self.trainer.lr_scheduler_configs] if self._trainer else []
        for scheduler in running:
            if isinstance(scheduler, ScheduleLR):  # for the command `branch`, which checks whether the decay had begun
                checkpoint[SCHEDULE_KEY] = {**to_plain(scheduler.schedule), "total_steps": scheduler.total_steps}
        if callable(self.optimizer):
            checkpoint[_FUNCTION_KEY] = re.sub(r" at 0x\w+", "", repr(self.optimizer))
        settings = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)
        if type(settings) is dict:
            kept = {key: value for key, value in settings.items() if key != "optimizer" or not callable(value)}
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = to_plain(kept)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on training from weights alone, or with an optimizer of another class."""
        super().on_load_checkpoint(checkpoint)
        self.check_mup(checkpoint)
        if self._trainer is None and self.optimizer is None:
            self._missing_optimizer = checkpoint.get(_FUNCTION_KEY)
        elif self._trainer is not None and self._trainer.state.fn == "fit":
            check_training_state(checkpoint, self._trainer.ckpt_path)
            self._check_frozen(checkpoint.get(_FROZEN_KEY, []))
            self._class_in_checkpoint = checkpoint.get("optimizer_class")
            self._check_optimizer_class()

    def _refuse_missing_callback(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a schedule-free optimizer without the callback that exchanges its two sets of weights."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if schedule_free_parts(optimizer) and not any(hasattr(one, "switches_schedule_free") for one in callbacks):
            raise UsageError(
                f"optimizer: {self._optimizer_class} trains one set of weights and evaluates another: add the callback "
                "ScheduleFree, which exchanges them"
            )

    def check_mup(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another MuP: they were trained with other multipliers and other learning rates."""
        here, there = self.mup, from_plain(checkpoint.get(MUP_KEY), MuP, "mup")
        if here != there:
            raise UsageError(
                f"the checkpoint was trained with mup={there or 'null'}, the recipe has mup={here or 'null'}: make "
                "them equal, or start without the checkpoint"
            )

    def _check_frozen(self, saved: list[str]) -> None:
        """Refuse other frozen parameters than the checkpoint's: its optimizer has no state for those, or too much."""
        if changed := sorted({*saved} ^ {*self._frozen}):
            raise UsageError(
                f"freeze={self.freeze_patterns}: the checkpoint's run {'froze' if changed[0] in saved else 'trained'} "
                f"'{changed[0]}', and this one does not: make freeze equal, or start a new run from its weights with "
                "--init_from (InitFrom from Python)"
            )

    def _check_optimizer_class(self) -> None:
        """Compare with the checkpoint, which Lightning loads before or after it builds the optimizer."""
        here, there = self._optimizer_class, self._class_in_checkpoint
        self._class_in_checkpoint = None if here else there
        if here and there and here != there:
            raise UsageError(
                f"the checkpoint holds the state of {there}, which {here} cannot take up: set the optimizer to "
                f"{there}, or start a new run from it with --init_from (InitFrom from Python), which keeps the weights "
                "and drops the optimizer's state, the schedule and the step"
            )


def planned_schedule(module: OptimizerMixin, total_steps: int | None) -> ScheduleLR:
    """The scheduler, with its optimizer, of a run that has not begun; needs no Trainer and draws no weights.

    Args:
        module: with its parameters, of which only names, shapes and dtypes count.
        total_steps: length of the run in optimizer steps.

    Raises:
        UsageError: see `build_optimizer` and `Schedule.check`.
    """
    optimizer = module.make_optimizer()
    curves = _curves_of_groups(module, optimizer)
    return ScheduleLR(optimizer, module.schedule or WarmupConstant(warmup_steps=0), total_steps, *curves)


def _curves_of_groups(
    module: OptimizerMixin, optimizer: torch.optim.Optimizer
) -> tuple[list[Schedule | None], list[Schedule | None]]:
    """For each group of the optimizer, the curves that its rule gives to its learning rate and to its decay."""
    rules = expanded(module, module.param_rules)
    of_groups = [rules[group["rule"]] if group["rule"] is not None else None for group in optimizer.param_groups]
    return [rule and rule.schedule for rule in of_groups], [rule and rule.decay_schedule for rule in of_groups]


def _refuse_for_run(optimizer: torch.optim.Optimizer, trainer: Any, module: Any) -> None:
    """Refuse an optimizer that is known not to work with the Trainer's strategy or precision, or with the module."""
    layout, places = weights_layout(trainer.strategy), list[Where]()
    if layout != "whole":
        places.append("shards" if layout in ("shards", "foreign shards") else "flat parameters")
    if is_a(trainer.precision_plugin, "BF16True"):
        places.append("BF16True")
    if module.automatic_optimization and type(module).backward is pl.LightningModule.backward:
        places.append("first derivatives")
    refuse_limits(optimizer, *places)


def _refuse_finetuning(trainer: Any) -> None:
    """Refuse callbacks that put further parameters into the optimizer during the run, such as BackboneFinetuning."""
    for callback in trainer.callbacks:
        if is_a(callback, "BaseFinetuning"):
            raise UsageError(
                f"{type(callback).__name__} adds parameters to the optimizer during training, and OptimizerMixin has "
                "all of them from the start: leave it out, and hold layers back by a rule with a schedule of their own "
                "(ParamRule.schedule), or freeze them in a first fit and not in a second one"
            )


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer in checkpoints: its class, its package, and the optimizers that it is composed of.

    The package matters: two libraries have a SOAP each, and neither can load the state of the other's.
    """
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    if isinstance(optimizer, ComposedOptimizer) and not isinstance(optimizer, MuonAdamW):
        return f"{name}({', '.join(f'{key}={_name_of(part)}' for key, part in optimizer.optimizers.items())})"
    return name if package in ("torch", "lightning_tricks") else f"{package}.{name}"


class ScheduleLength(pl.Callback):
    """Sets the length of each `ScheduleLR` when training starts, before the first step. Has no state.

    It also says in one line if the learning rate jumps at a resume. It is the last callback, because the others may
    move the position of a resumed run.
    """

    @classmethod
    def attach_to(cls, trainer: Any) -> None:
        """Add the callback behind the Trainer's others. Idempotent."""
        others = [callback for callback in trainer.callbacks if not isinstance(callback, cls)]
        trainer.callbacks = [*others, cls()]  # a new list: Lightning may be iterating over the old one

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Set the length of the run if it has changed, and the step if no checkpoint has set the schedule's.

        No checkpoint sets it in a second fit of a Trainer, whose step count goes on, or if the saved run had no
        schedule.
        """
        total = run_length(trainer)
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if not isinstance(scheduler, ScheduleLR):
                continue
            if scheduler.length_follows or scheduler.total_steps != total:
                with _naming_option(trainer, total):
                    scheduler.set_total_steps(total)
            # not by its step: it is 0 also in a checkpoint of a run whose steps have all overflowed in fp16
            if not scheduler.has_loaded and (pl_module.automatic_optimization or not trainer.ckpt_path):
                scheduler.load_state_dict({"last_epoch": trainer.global_step})
            if trainer.ckpt_path:
                _say_if_lr_jumps(trainer, scheduler)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Leave the Trainer's callbacks as they were."""
        kept = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]


def _say_if_lr_jumps(trainer: Any, scheduler: ScheduleLR) -> None:
    """On a resume, one line if the learning rate of the next step is not that of the checkpoint's run."""
    before, now = scheduler.loaded_lr, float(scheduler.optimizer.param_groups[0]["lr"])
    if before is not None and not math.isclose(before, now, rel_tol=1e-3):
        rank_zero_warn(
            f"step {trainer.global_step}: lr is {now:.4g}, and was {before:.4g} in the checkpoint's run: the schedule, "
            f"its lr or the run's length (max_steps={trainer.max_steps}) has changed; the recipe's values are used"
        )


@contextmanager
def _naming_option(trainer: Any, total: int | None) -> Iterator[None]:
    """Let errors inside the `with` name the option that gave the length of the run, if it is not `max_steps`."""
    planner = _planner(trainer)
    try:
        yield
    except UsageError as error:
        if planner is not None:
            raise UsageError(f"total_tokens={planner.total_tokens} makes {total} steps: {error}") from None
        if total is not None and total != trainer.max_steps:
            raise UsageError(f"trainer.max_epochs={trainer.max_epochs} makes {total} steps: {error}") from None
        raise


def _check_length(trainer: Any, datamodule: Any, module: Any, curves: Sequence[Schedule]) -> None:
    """Refuse a schedule that does not fit the length of the run, as far as it is known before the data are prepared."""
    planner, steps = _planner(trainer), trainer.max_steps
    if planner is not None:
        steps = planner.planned_steps(trainer, datamodule)
    elif steps < 0 and _by_epochs(trainer):
        steps = None
    length_follows = steps is None and module.automatic_optimization
    for curve in () if length_follows else curves:
        with _naming_option(trainer, steps):
            curve.check(steps)


def _planner(trainer: Any) -> Any:
    """The callback that gives the run its length in tokens, by its method `planned_steps`: TotalTokens; or None."""
    return next((callback for callback in trainer.callbacks if hasattr(callback, "planned_steps")), None)


def _by_epochs(trainer: Any) -> bool:
    """Whether a number of epochs ends the run."""
    return trainer.max_epochs is not None and trainer.max_epochs >= 0
