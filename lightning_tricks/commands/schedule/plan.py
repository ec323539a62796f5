"""The plan of a run from its recipe: learning rates, weight decays, batch and tokens of every step."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_tricks._core.accumulation import Accumulation
from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.machine import devices_here, listed, named_devices
from lightning_tricks._trainer.objects import is_a, steps_between_saves
from lightning_tricks._trainer.run_facts import micro_batch, planned_data_ranks
from lightning_tricks.commands.plan.setup import configure_on_meta
from lightning_tricks.guards.batch_size_warmup import BatchSizeWarmup
from lightning_tricks.guards.lr_scaling_rule import LRScalingRule
from lightning_tricks.guards.total_tokens import TotalTokens
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.mixins.optimizer_mixin import planned_schedule
from lightning_tricks.schedules import PlannedGroup, Schedule, chosen_steps, planned_groups

Curves = Callable[[Sequence[int]], tuple[PlannedGroup, ...]]
_MOST_MARKS = 10_000  # of a kind: no picture shows more


@dataclass(frozen=True)
class Phase:
    """A part of the run in which the curve has one form and the batch one size.

    Args:
        name: `warmup`, `stable`, `decay` and so on; `larger batch` where only the batch changes; `end` is no part, but
            the last step.
        step: its first step, counted from 0.
        tokens: seen before that step; None where the data do not tell the tokens of a step.
        rows: of that step, over all processes; None likewise.
        batch_tokens: tokens of that step.
        lr: of the first group without its scale, as LRMonitor logs it.
        weight_decay: the largest of the groups'.
    """

    name: str
    step: int
    tokens: int | None
    rows: int | None
    batch_tokens: int | None
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class SchedulePlan:
    """The plan of a run; `steps`, and the tuples of the same length, say what each of some steps does.

    Args:
        total_steps: length of the run in optimizer steps.
        steps: some steps, counted from 0; those at which a curve has a corner are among them.
        groups: curves of each parameter group.
        rows: rows of each step, over all processes; None where the data module does not tell.
        batch_tokens: tokens of each step likewise.
        tokens: tokens seen before each step.
        phases: parts of the run, in their order; the last one is `end`.
        validations: number of optimizer steps done at each validation.
        checkpoints: number of optimizer steps done at each save.
        permanent: those of them that SafeCheckpoint never deletes.
        total_tokens: at the end of the run.
        notes: lines on what the recipe alone does not tell.
    """

    total_steps: int
    steps: tuple[int, ...]
    groups: tuple[PlannedGroup, ...]
    rows: tuple[int, ...] | None
    batch_tokens: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    phases: tuple[Phase, ...]
    validations: tuple[int, ...]
    checkpoints: tuple[int, ...]
    permanent: tuple[int, ...]
    total_tokens: int | None
    notes: tuple[str, ...]

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate at `steps`, as LRMonitor logs it: of the first group, without its scale."""
        return self.groups[0].unscaled_lr

    @property
    def peak(self) -> float:
        """The highest learning rate, as LRMonitor logs it."""
        return max(self.lr)


def planned(
    module: Any, datamodule: Any, trainer: Mapping[str, Any], steps: Iterable[int] | None = None
) -> SchedulePlan:
    """The plan of a run. Draws no weights and needs none of the recipe's devices; `module` stays as it is.

    Args:
        module: with OptimizerMixin.
        datamodule: with `micro_batch_size` and `seq_len`, or None: then no tokens are known.
        trainer: the Trainer's arguments with classes as objects, such as the last of `load_recipe`'s three results.
        steps: to evaluate; None for about 600, evenly spaced, with every corner of the curves.

    Raises:
        UsageError: the length of the run is not in the recipe; an error of the optimizer, the schedule or a callback.

    Example:
        plan = planned(*load_recipe("--config", "recipes/tiny.yaml"))
    """
    settings = _RunSettings.of(datamodule, trainer)
    plan, total = settings.accumulation(), settings.total_steps()
    curves, schedule, kinks = _curves_of(module, settings, plan, total)
    starts = [*plan.starts, *kinks]
    corners = sorted({corner + shift for corner in starts for shift in (-1, 0)})
    chosen = chosen_steps(total, also=corners) if steps is None else list(steps)
    batch = _Batch(settings, plan)
    permanent = batch.permanent_saves(total)
    saves = {step for every in settings.save_every for step in _multiples(every, total)}
    return SchedulePlan(
        total_steps=total,
        steps=tuple(chosen),
        groups=curves(chosen),
        rows=batch.of_each(chosen, settings.rows),
        batch_tokens=batch.of_each(chosen, settings.tokens),
        tokens=None if settings.tokens is None else tuple(batch.tokens_before(step) or 0 for step in chosen),
        phases=tuple(_phases(schedule, plan, total, curves, batch)),
        validations=tuple(batch.validations(total)),
        checkpoints=tuple(sorted({*saves, *permanent})),
        permanent=tuple(permanent),
        total_tokens=batch.tokens_before(total),
        notes=tuple(settings.notes),
    )


def planned_tokens(datamodule: Any, trainer: Mapping[str, Any]) -> int | None:
    """Tokens of a whole run of all processes; None where the recipe does not tell its steps, or their tokens.

    Args:
        datamodule: see `planned`.
        trainer: see `planned`.
    """
    settings = _RunSettings.of(datamodule, trainer)
    try:
        return _Batch(settings, settings.accumulation()).tokens_before(settings.total_steps())
    except UsageError:
        return None


# ---- the run


@dataclass
class _RunSettings:
    """The settings of a run that its batch and its length depend on."""

    datamodule: Any
    trainer: Mapping[str, Any]
    callbacks: list[Any]
    rows: int | None  # in one micro-batch of one process
    tokens: int | None
    data_ranks: int
    notes: list[str]

    @classmethod
    def of(cls, datamodule: Any, trainer: Mapping[str, Any]) -> "_RunSettings":
        notes: list[str] = []
        if (devices := named_devices(trainer)) is None:
            devices, given = devices_here(trainer), trainer.get("devices")
            if trainer.get("accelerator") != "cpu":
                notes.append(
                    f"trainer.devices={given}: {devices} on this machine; give --trainer.devices N for another one"
                )
        ranks = planned_data_ranks(trainer.get("strategy"), devices, int(trainer.get("num_nodes") or 1))
        rows, tokens = micro_batch(datamodule)
        if tokens is None:
            notes.append("the data module has no micro_batch_size and seq_len, so the tokens of a step are not known")
        return cls(datamodule, trainer, listed(trainer, "callbacks"), rows, tokens, ranks, notes)

    @property
    def micro_batches(self) -> int:
        """The recipe's, of one step and one process."""
        return int(self.trainer.get("accumulate_grad_batches") or 1)

    @property
    def save_every(self) -> list[int]:
        """Steps between saves, of each saver."""
        return steps_between_saves(SimpleNamespace(checkpoint_callbacks=self.savers))

    @property
    def savers(self) -> list[Any]:
        return [callback for callback in self.callbacks if is_a(callback, "ModelCheckpoint")]

    def _trainer(self) -> Any:
        """The attributes of a Trainer that callbacks ask for before a run."""
        max_steps = self.trainer.get("max_steps")
        return SimpleNamespace(
            max_steps=-1 if max_steps is None else max_steps,
            accumulate_grad_batches=self.micro_batches,
            callbacks=self.callbacks,
            num_devices=self.data_ranks,
            num_nodes=1,
        )

    def accumulation(self) -> Accumulation:
        """The micro-batches of each step and process."""
        for callback in self.callbacks:
            if isinstance(callback, BatchSizeWarmup):
                return copy.copy(callback).planned(self._trainer(), self.datamodule, self.data_ranks)
            if hasattr(callback, "get_accumulate_grad_batches"):
                raise UsageError(
                    f"schedule: {type(callback).__name__} changes the batch by epochs, whose steps a recipe does not "
                    "tell: take BatchSizeWarmup, or take the callback out for the plan"
                )
        return Accumulation((0,), (self.micro_batches,))

    def total_steps(self) -> int:
        """The length of the run."""
        trainer, epochs = self._trainer(), self.trainer.get("max_epochs")
        for callback in self.callbacks:
            if isinstance(callback, TotalTokens):
                planner = copy.copy(callback)
                planner.resumes = False
                return int(planner.planned_steps(trainer, self.datamodule) or 0)
        if trainer.max_steps < 1:
            raise UsageError(
                f"schedule: trainer.max_steps={trainer.max_steps}, and the recipe does not tell the steps of an epoch: "
                "give --trainer.max_steps N, or --total_tokens N"
            )
        if epochs is not None and epochs >= 0:
            self.notes.append(f"trainer.max_epochs={epochs} may end the run before its max_steps={trainer.max_steps}")
        return int(trainer.max_steps)

    def factors(self, plan: Accumulation) -> list[Callable[[int], float]]:
        """What callbacks multiply the learning rates by."""
        found: list[Callable[[int], float]] = []
        for callback in self.callbacks:
            if isinstance(callback, BatchSizeWarmup):
                found.append(callback.planned_factor(plan))
            elif isinstance(callback, LRScalingRule):
                factor = callback.planned(self.datamodule, self.data_ranks * self.micro_batches)[1]
                found.append(lambda step, factor=factor: factor)  # type: ignore[misc]
        return found


class _Batch:
    """Rows and tokens of the steps of a run, and the places of its marks."""

    def __init__(self, settings: _RunSettings, plan: Accumulation) -> None:
        self._settings, self._plan = settings, plan

    def of_step(self, step: int, in_micro_batch: int | None) -> int | None:
        """Rows or tokens of one step of all processes."""
        return None if in_micro_batch is None else self._plan.at(step) * self._settings.data_ranks * in_micro_batch

    def of_each(self, steps: Sequence[int], in_micro_batch: int | None) -> tuple[int, ...] | None:
        """The same of several steps."""
        return None if in_micro_batch is None else tuple(self.of_step(step, in_micro_batch) or 0 for step in steps)

    def tokens_before(self, step: int) -> int | None:
        """Tokens of all steps before one."""
        tokens = self._settings.tokens
        return None if tokens is None else self._plan.before(step) * self._settings.data_ranks * tokens

    def validations(self, total: int) -> list[int]:
        """Optimizer steps done at each validation, where it comes after a number of micro-batches.

        Read from `_TrainingEpochLoop._should_check_val_fx` of Lightning. It counts them anew in each epoch, whose
        length a recipe does not tell: here they are counted from the start.
        """
        trainer = self._settings.trainer
        interval, every = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
        if isinstance(interval, bool) or not isinstance(interval, int) or trainer.get("limit_val_batches") == 0:
            return []
        if interval < 1 or every not in (None, 1):
            return []
        number = min(self._plan.before(total) // interval, _MOST_MARKS)
        return sorted({self._plan.whole_steps(0, (i + 1) * interval) for i in range(number)} - {0})

    def permanent_saves(self, total: int) -> list[int]:
        """Optimizer steps done at each save that stays."""
        found: set[int] = set()
        for saver in self._settings.savers:
            every = getattr(saver, "permanent_steps", None)
            if every == "powers_of_two":
                found |= {2**power for power in range(total.bit_length())}
            elif every:
                found |= set(_multiples(every, total))
        return sorted(found)


def _multiples(every: int, total: int) -> list[int]:
    return list(range(every, total + 1, every))[:_MOST_MARKS]


def _phases(schedule: Schedule, plan: Accumulation, total: int, curves: Curves, batch: _Batch) -> list[Phase]:
    """The parts of the curve, divided where the batch grows, and the last step."""
    names = sorted(schedule.phases(total), key=lambda part: part[1])
    names = [part for part in names if part[1] < total]
    starts = {step: name for name, step in names}
    for step in plan.starts[1:]:
        if step < total:
            starts.setdefault(step, "larger batch")
    at = [*sorted(starts), total - 1]
    groups, settings = curves(at), batch._settings
    return [
        Phase(
            "end" if number == len(at) - 1 else starts[step],
            step,
            batch.tokens_before(total if number == len(at) - 1 else step),
            batch.of_step(step, settings.rows),
            batch.of_step(step, settings.tokens),
            groups[0].unscaled_lr[number],
            max(group.weight_decay[number] for group in groups),
        )
        for number, step in enumerate(at)
    ]


# ---- the optimizer


def _curves_of(
    module: Any, settings: _RunSettings, plan: Accumulation, total: int
) -> tuple[Curves, Schedule, list[int]]:
    """The curves of a module's parameter groups, the schedule that has the names of their parts, and their corners."""
    if not isinstance(module, OptimizerMixin):
        raise UsageError(
            f"schedule: model={type(module).__name__}: only a run tells the learning rates of configure_optimizers: "
            "derive it from OptimizerMixin, or call lightning_tricks.schedules.planned_groups with its ScheduleLR"
        )
    scheduler = planned_schedule(without_weights(module), total)
    if scheduler.total_steps != total:
        scheduler.set_total_steps(total)
    for factor in settings.factors(plan):
        scheduler.scale_by(factor)
    kinks = [step for curve in scheduler.curves for _, step in curve.phases(total)]
    return (lambda steps: planned_groups(scheduler, steps)), scheduler.schedule, kinks


def without_weights(module: Any) -> Any:
    """A copy of a module whose parameters have their shapes and no memory: each has one number, seen many times.

    They are on the CPU and not on the meta device, where an optimizer with `fused=True` refuses them.
    """
    twin = _hollow_copy(module)
    if isinstance(twin, LanguageModel):
        twin.compile_blocks = False  # compiled blocks have the same parameters, and torch.compile takes seconds
    if hasattr(twin, "configure_model"):
        configure_on_meta(twin)
    return _hollow_copy(twin)


def _hollow_copy(module: nn.Module) -> Any:
    memo: dict[int, Any] = {}
    for param in module.parameters():
        hollow = nn.Parameter(torch.empty((), dtype=param.dtype).expand(param.shape), param.requires_grad)
        vars(hollow).update(vars(param))
        memo[id(param)] = hollow
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        memo[id(trainer)] = None  # the plan is that of the settings given
    return copy.deepcopy(module, memo)
