"""Begin a run with a small global batch and let it grow: early in training, a large batch wastes tokens.

The critical batch size, up to which a larger batch needs no more tokens for the same loss, is small at first and grows
quickly. The global batch grows here through gradient accumulation, so memory and speed of a micro-batch stay the same.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_tricks._core.accumulation import Accumulation, MicroBatches, micro_batches_in_step
from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.loop import batch_progress
from lightning_tricks._trainer.objects import unwrapped
from lightning_tricks._trainer.run_facts import data_rank, micro_batch, planned_data_ranks
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.schedules import ScheduleLR, WarmupConstant

__all__ = ["BatchSizeWarmup"]

Unit = Literal["steps", "tokens"]
LRRule = Literal["none", "linear", "sqrt"]
_POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def doubling(first: int, last: int, every: int) -> dict[int, int]:
    """Stages that double from `first` micro-batches to `last`, a new one after each `every` steps or tokens."""
    stages, size = {0: first}, first
    while size < last:
        size = min(2 * size, last)
        stages[len(stages) * every] = size
    return stages


def first_steps(stages: Mapping[int, int], micro_batch_tokens: int) -> dict[int, int]:
    """Stages by tokens, turned into stages by steps: each begins with the first step that has so many tokens before it.

    Args:
        stages: micro-batches of one step, of all processes together, by the tokens before the first such step.
        micro_batch_tokens: tokens of one micro-batch of one process.
    """
    step, done, before, by_step = 0, 0, 0, {}
    for tokens, size in sorted(stages.items()):
        if before:
            steps = max(ceil((tokens - done * micro_batch_tokens) / (before * micro_batch_tokens)), 0)
            step, done = step + steps, done + steps * before
        by_step[step], before = size, size
    return by_step


def lr_factor(batch: float, reference: float, rule: LRRule) -> float:
    """The factor of the learning rate for a batch: (batch / reference) to the power of 1, 1/2 or 0."""
    return float((batch / reference) ** _POWERS[rule])


class LearningRates:
    """Multiplies the learning rates of all groups by a factor of the step, over the run's schedule.

    Make it in `on_fit_start`: then the optimizers have the recipe's learning rates, and a checkpoint is loaded later.

    Args:
        trainer: in `fit`.
        who: name for messages.
        factor: of the optimizer step; 1.0 leaves a learning rate as it is, to the bit.

    Raises:
        UsageError: the learning rate is set by something else than ScheduleLR: a factor over a rate that follows from
            the rate before it would multiply at each step.
    """

    def __init__(self, trainer: Any, who: str, factor: Callable[[int], float]) -> None:
        self._factor = factor
        self._lag = 0  # optimizer steps that the scheduler has not counted: those that fp16 skipped
        if not trainer.lr_scheduler_configs:
            trainer.lr_scheduler_configs.extend(_constant(optimizer) for optimizer in trainer.optimizers)
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, ScheduleLR) or config.interval != "step" or config.frequency != 1:
                raise UsageError(
                    f"{who}: {type(config.scheduler).__name__} sets the learning rate (interval {config.interval}, "
                    f"frequency {config.frequency}): give it to ScheduleLR with interval step and frequency 1, or put "
                    "the factor into your scheduler"
                )
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for scheduler in self._schedulers:
            scheduler.scale_by(self._at)

    def _at(self, step: int) -> float:
        """The factor at a step of the scheduler."""
        return self._factor(step + self._lag)

    def refresh(self) -> None:
        """Set the learning rates anew: the factor has another value now."""
        for scheduler in self._schedulers:
            scheduler.refresh()

    def begin_step(self, step: int) -> None:
        """Set the learning rates of a step that begins, where the scheduler has counted fewer steps."""
        for scheduler in self._schedulers:
            if (lag := step - scheduler.last_epoch) != self._lag:
                self._lag = lag
                self.refresh()


def _constant(optimizer: Any) -> Any:
    """A constant learning rate, as Lightning holds a scheduler."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer  # inside DeepSpeed's, with the same groups
    scheduler = ScheduleLR(optimizer, WarmupConstant(warmup_steps=0))
    return pl.utilities.types.LRSchedulerConfig(scheduler, interval="step")


class BatchSizeWarmup(pl.Callback):
    """Changes training: early steps accumulate fewer micro-batches, so that the global batch grows to the recipe's.

    The recipe's own batch, `accumulate_grad_batches` micro-batches on each process, is the last stage. The number of
    micro-batches is a function of the step alone, so a resume in mid-ramp goes on as the run that nobody interrupted,
    to the bit. It changes between two optimizer steps only, at exactly the given step. Each step's loss is the mean
    over its own micro-batches.

    Stages count the micro-batches of all processes together. A run that goes on with another number of processes keeps
    its global batch with the same stages, if `accumulate_grad_batches` changes the other way.

    `train/batch_tokens` is the global batch of each step, where the data module has `micro_batch_size` and `seq_len`
    (TextData, TokenData); elsewhere `train/batch_micro_batches`.

    Args:
        stages: by the first step (or the tokens before it), the micro-batches of one step of all processes together:
            `{0: 8, 1000: 16, 3000: 32}`. The last is the recipe's. None: give `double_every`.
        double_every: steps (or tokens) after which the batch doubles, until it is the recipe's. None: give `stages`.
        start: first batch under `double_every`, in micro-batches of all processes together. Default: one on each.
        unit: of `stages` and `double_every`. `tokens` needs a data module with `micro_batch_size` and `seq_len`.
        lr_rule: the learning rate of a stage is the schedule's, times (batch / recipe's batch) to the power of 1
            (`linear`), 1/2 (`sqrt`) or 0 (`none`). The default changes nothing but the batch; OLMo-core takes `sqrt`.

    Raises:
        UsageError: stages that do not grow from step 0 to the recipe's batch, or that the processes cannot share
            evenly; manual optimization; a strategy that counts micro-batches itself; a second callback that changes
            them; an `lr_rule` over a scheduler that is no ScheduleLR.

    Source: Brown et al. 2020 (GPT-3), https://arxiv.org/abs/2005.14165, section B; McCandlish et al. 2018,
        https://arxiv.org/abs/1812.06162; Merrill et al. 2025, https://arxiv.org/abs/2505.23971, and its
        `BatchSizeSchedulerCallback`,
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/train/callbacks/batch_size_scheduler.py.
    """

    def __init__(
        self,
        stages: dict[int, int] | None = None,
        double_every: int | None = None,
        start: int | None = None,
        unit: Unit = "steps",
        lr_rule: LRRule = "none",
    ) -> None:
        if (stages is None) == (double_every is None):
            raise UsageError(f"BatchSizeWarmup: stages={stages}, double_every={double_every}: give one of the two")
        if start is not None and double_every is None:
            raise UsageError(f"BatchSizeWarmup.start={start}: it is for double_every; stages name their first batch")
        for name, value in (("double_every", double_every), ("start", start)):
            if value is not None and value < 1:
                raise UsageError(f"BatchSizeWarmup.{name}={value}: give 1 or more")
        for name, choice, choices in (("unit", unit, Unit), ("lr_rule", lr_rule, LRRule)):
            check_choice(f"BatchSizeWarmup.{name}", choice, choices)
        self.stages, self.double_every, self.start, self.unit, self.lr_rule = stages, double_every, start, unit, lr_rule
        self.accumulation: Accumulation | None = None  # what `_accumulation.accumulation` finds; stays after the fit
        self._trainer: Any = None
        self._loaded: dict[str, int] = {}

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse stages that these processes cannot have, before any of them is started."""
        if stage == "fit":
            _refuse_others(trainer)
            ranks = planned_data_ranks(trainer.strategy, trainer.num_devices, trainer.num_nodes)
            self.planned(trainer, datamodule, ranks)

    def setup(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Fix the stages; become the first callback, so that the hooks of others find the step's micro-batches set."""
        if stage != "fit":
            return
        _refuse_others(trainer)
        self._trainer, self._begun = trainer, False
        self._buffer = MetricBuffer.of(trainer)
        self.accumulation = self.planned(trainer, trainer.datamodule, data_rank(trainer)[1])
        trainer.accumulate_grad_batches = self._final
        others = [callback for callback in trainer.callbacks if callback is not self]
        trainer.callbacks = [self, *others]

    def planned(self, trainer: Any, data: Any, world: int) -> Accumulation:
        """The micro-batches of each step of a run that has not begun; `data` is its data module, if it has one.

        Raises:
            UsageError: see the class.
        """
        value: int = trainer.accumulate_grad_batches
        self._final: int = value.final if isinstance(value, MicroBatches) else value  # of a fit before this one
        self._world, self._tokens = world, micro_batch(data)[1]
        stages = self._checked(self._final * world)
        return Accumulation(tuple(stages), tuple(size // world for size in stages.values()))

    def planned_factor(self, plan: Accumulation) -> Callable[[int], float]:
        """The factor of each step's learning rate, for the micro-batches that `planned` gives."""
        return partial(_factor, plan, self.lr_rule)

    def _checked(self, last: int) -> dict[int, int]:
        """The stages by step; `last` is the recipe's batch in micro-batches of all processes."""
        if self.double_every is not None:
            stages = doubling(min(self.start or self._world, last), last, self.double_every)
        else:
            stages = dict(sorted((self.stages or {}).items()))
        whose, sizes = f"BatchSizeWarmup.stages={stages}", list(stages.values())
        if not stages or min(stages) != 0 or sorted(set(sizes)) != sizes or sizes[0] < 1:
            raise UsageError(f"{whose}: give a first stage at 0, and a larger batch in each later one")
        processes = f"{self._world} process(es) x accumulate_grad_batches={self._final}"
        if sizes[-1] != last:
            raise UsageError(
                f"{whose}: the last stage must be the recipe's batch, {last} micro-batches ({processes}): change one "
                "of the two"
            )
        if odd := [size for size in sizes if size % self._world]:
            raise UsageError(
                f"{whose}: {self._world} processes cannot share {odd[0]} micro-batches evenly: begin with a larger "
                "batch, or halve micro_batch_size and double the stages and accumulate_grad_batches"
            )
        if self.unit == "steps":
            return stages
        if self._tokens is None:
            raise UsageError(
                "BatchSizeWarmup.unit=tokens: the data module has no micro_batch_size and seq_len that tell the tokens "
                "of a micro-batch: give unit=steps"
            )
        return first_steps(stages, self._tokens)

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Put the rule over the run's schedule, before a checkpoint is loaded; print the stages."""
        assert self.accumulation is not None
        plan, rule = self.accumulation, self.lr_rule
        self._rates: LearningRates | None = None
        if rule != "none":
            self._rates = LearningRates(trainer, "BatchSizeWarmup", self.planned_factor(plan))
        sizes = ", ".join(
            f"{self._shown(number)} from step {start}"
            for start, number in zip(plan.starts, plan.micro_batches, strict=True)
        )
        rank_zero_info(f"BatchSizeWarmup: a step takes {sizes}; lr_rule {rule}")

    def _shown(self, number: int) -> str:
        if self._tokens is None:
            return f"{number * self._world} micro-batch(es)"
        return f"{number * self._world * self._tokens:,} tokens"

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Where a resume goes on within a step, begin that step anew: its gradients are lost."""
        progress, loaded = batch_progress(trainer), self._loaded
        self._loaded, self._begun = {}, False
        same_count = loaded.get("ready") == progress.total.ready  # else somebody has put the count back to a whole step
        in_step = loaded.get("in_step", 0) if same_count else 0
        self._set(trainer, progress.current.ready - in_step if in_step else None)

    def _set(self, trainer: Any, first: int | None) -> None:
        assert self.accumulation is not None
        step = trainer.global_step
        trainer.accumulate_grad_batches = MicroBatches(self.accumulation.at(step), first, step, self._final)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """At the first micro-batch of a step, set how many it has, and its learning rate."""
        before = batch_progress(trainer).current.ready - 1
        value: Any = trainer.accumulate_grad_batches
        # not by the remainder: a loader that gives None has a micro-batch without this hook
        if self._begun and before > 0 and before < value.first + value:
            return
        self._begun = True
        self._set(trainer, before)
        if self._rates is not None:
            self._rates.begin_step(trainer.global_step)
        number = trainer.accumulate_grad_batches * self._world
        if self._tokens is None:
            self._buffer.record("train/batch_micro_batches", number)
        else:
            self._buffer.record("train/batch_tokens", number * self._tokens)

    def state_dict(self) -> dict[str, int]:
        """Whether a step is open: the micro-batches of it, and of the whole run."""
        if self._trainer is None:
            return {}
        progress = batch_progress(self._trainer)
        in_step = micro_batches_in_step(self._trainer, progress.current.ready)
        return {"in_step": in_step, "ready": progress.total.ready}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Keep it for the start of training."""
        self._loaded = state_dict


def _factor(plan: Accumulation, rule: LRRule, step: int) -> float:
    """The factor of a step's learning rate, by its batch."""
    return lr_factor(plan.at(step), plan.micro_batches[-1], rule)


def _refuse_others(trainer: Any) -> None:
    """Refuse a number of micro-batches that the module, the strategy or another callback sets."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UsageError(
            f"BatchSizeWarmup: {type(module).__name__} optimizes manually, so the Trainer does not accumulate: let the "
            "module count its micro-batches"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise UsageError(
            f"BatchSizeWarmup: {type(trainer.strategy).__name__} has a fixed number of micro-batches in its engine: "
            "take DeepSpeedZeROStrategy"
        )
    refuse_accumulation_of_others(trainer, "BatchSizeWarmup", "keep one of the two")


def refuse_accumulation_of_others(trainer: Any, who: str, remedy: str) -> None:
    """Refuse a callback, such as GradientAccumulationScheduler, that changes the micro-batches of a step in the run."""
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            raise UsageError(f"{who}: with {type(callback).__name__} the batch of a step changes in the run: {remedy}")
