"""Find the length of a run for its schedule: from `max_steps` at once, from epochs or tokens when training starts.

Only then does the Trainer know its data and the position of a checkpoint; to ask earlier would start the loaders.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer import micro_batches_before_validation, run_length
from lightning_tricks.schedules import Schedule, ScheduleLR


class ScheduleLength(pl.Callback):
    """Sets the length of each `ScheduleLR` when training starts, before the first step. Has no state.

    It also says in one line if the learning rate jumps at a resume, and if the run ends before its first validation. It
    is the last callback, because the others may move the position of a resumed run.
    """

    @classmethod
    def attach_to(cls, trainer: Any) -> None:
        """Add the callback to a Trainer, behind its other callbacks. Idempotent."""
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
                if total is None:
                    _refuse_unknown_length(trainer, trainer.lightning_module, scheduler.curves)
                with _naming_option(trainer, total):
                    scheduler.set_total_steps(total)
            never_loaded = pl_module.automatic_optimization and scheduler.last_epoch == 0
            if never_loaded or not trainer.ckpt_path:
                scheduler.load_state_dict({"last_epoch": trainer.global_step})
            if trainer.ckpt_path:
                _say_if_lr_jumps(trainer, scheduler)
        _say_if_never_validated(trainer)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Leave the Trainer's callbacks as they were."""
        kept = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]


def _say_if_lr_jumps(trainer: Any, scheduler: ScheduleLR) -> None:
    """On a resume, one line if the learning rate of the next step is not that of the checkpoint's run."""
    before, now = scheduler.loaded_lr, float(scheduler.optimizer.param_groups[0]["lr"])
    if before is not None and not math.isclose(before, now, rel_tol=1e-3):
        rank_zero_warn(
            f"step {trainer.global_step} has lr {now:.4g}, in the checkpoint's run {before:.4g}: the schedule, its lr "
            f"or the length of the run (max_steps={trainer.max_steps}) is another one now; the recipe's are used"
        )


def _say_if_never_validated(trainer: Any) -> None:
    """One line if the run ends before its first validation."""
    if (found := micro_batches_before_validation(trainer)) is not None:
        first, total = found
        rank_zero_warn(
            f"val_check_interval={trainer.val_check_interval}: this run has no validation: the first one would come "
            f"after {first} micro-batches, max_steps={trainer.max_steps} ends the run after {total}; set a smaller "
            "val_check_interval, or limit_val_batches=0"
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
        if total != trainer.max_steps:
            raise UsageError(f"trainer.max_epochs={trainer.max_epochs} makes {total} steps: {error}") from None
        raise


def _refuse_unknown_length(trainer: Any, module: Any, curves: Sequence[Schedule]) -> None:
    """Refuse a number of epochs whose steps cannot be known, where a curve needs the length of the run."""
    where = "where the training loader has no length" if module.automatic_optimization else "with manual optimization"
    for curve in curves:
        if curve.needs_total:
            raise UsageError(
                f"{type(curve).__name__} needs the length of the run, which trainer.max_epochs={trainer.max_epochs} "
                f"does not tell {where}: set trainer.max_steps"
            )


def schedule_lr(
    trainer: Any,
    optimizer: Any,
    schedule: Schedule,
    group_schedules: Sequence[Schedule | None],
    decay_schedules: Sequence[Schedule | None],
) -> ScheduleLR:
    """The scheduler of a run, whose length is set when training starts; see `ScheduleLR`.

    Raises:
        UsageError: a schedule does not fit the run, as far as its length is known.
    """
    ScheduleLength.attach_to(trainer)
    curves = group_schedules, decay_schedules
    with _naming_option(trainer, trainer.max_steps):
        if _by_epochs(trainer) and trainer.max_steps < 0:
            return ScheduleLR(optimizer, schedule, None, *curves, length_follows=True)
        return ScheduleLR(optimizer, schedule, trainer.max_steps, *curves)


def check_length(trainer: Any, datamodule: Any, module: Any, curves: Sequence[Schedule]) -> None:
    """Refuse a schedule that does not fit the length of the run, as far as that is known before the data are prepared.

    Raises:
        UsageError: see `Schedule.check`; `max_epochs` alone with manual optimization.
    """
    planner, steps = _planner(trainer), trainer.max_steps
    if planner is not None:
        steps = planner.planned_steps(trainer, datamodule)
    elif steps < 0 and _by_epochs(trainer):
        steps = None
        if not module.automatic_optimization:
            _refuse_unknown_length(trainer, module, curves)
    for curve in curves if steps is not None else ():
        with _naming_option(trainer, steps):
            curve.check(steps)


def _planner(trainer: Any) -> Any:
    """The callback that gives the run its length in tokens, by its method `planned_steps`: TotalTokens; or None."""
    return next((callback for callback in trainer.callbacks if hasattr(callback, "planned_steps")), None)


def _by_epochs(trainer: Any) -> bool:
    """Whether a number of epochs ends the run."""
    return trainer.max_epochs is not None and trainer.max_epochs >= 0
