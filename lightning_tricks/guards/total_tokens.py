"""End a run after a number of training tokens, and count those of the runs from which it goes on."""

import math
from contextlib import ExitStack
from typing import Any

from lightning_tricks._core.accumulation import Accumulation
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info
from lightning_tricks._trainer.run_facts import data_rank, micro_batch, planned_data_ranks
from lightning_tricks._trainer.run_length import step_limit
from lightning_tricks.guards.batch_size_warmup import BatchSizeWarmup, refuse_accumulation_of_others

__all__ = ["TotalTokens"]


class TotalTokens(pl.Callback):
    """Ends a run after a number of training tokens: sets the Trainer's `max_steps` for as long as a fit lasts.

    The run ends with the first optimizer step at which the tokens of all processes reach `total_tokens`. Because they
    become `max_steps`, before the data are asked for, the schedule, the progress bar, averages and monitors have the
    right length. Under BatchSizeWarmup each step counts with its own batch. On a resume the tokens count that the
    checkpoint's runs have seen, whatever their batches were, so the run still ends at the same number of tokens with
    other devices, accumulation or micro-batches.

    Tokens are positions: padding counts. `max_steps` must be left out; with `max_epochs`, whichever comes first ends
    the run. Give a Trainer of your own `max_epochs=-1`, as Lightning sets 1000 where neither is given.

    Args:
        total_tokens: of the whole run, over all processes and resumes; a whole number, also written 2e9.
        micro_batch_tokens: tokens in one micro-batch of one process, for data that do not tell. None:
            `seq_len * micro_batch_size` of the Trainer's data module.

    Raises:
        UsageError: a number out of range; when the fit starts: `max_steps` is given too, the tokens of a step are not
            known, or change by a callback that is no BatchSizeWarmup (`GradientAccumulationScheduler`); manual
            optimization.
    """

    def __init__(self, total_tokens: float, micro_batch_tokens: int | None = None) -> None:
        for option, value in (("total_tokens", total_tokens), ("micro_batch_tokens", micro_batch_tokens)):
            whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value) and value > 0
            if isinstance(value, bool) or not (whole or (value is None and option == "micro_batch_tokens")):
                raise UsageError(f"TotalTokens.{option}={value!r}: give a whole number above 0, such as 2e9")
        self.total_tokens = int(total_tokens)
        self.micro_batch_tokens = micro_batch_tokens
        self.resumes = False  # whether the fit goes on from a checkpoint, as far as it is known before
        self._limit = ExitStack()  # our `max_steps`
        self._trainer: Any = None
        self._step = self._tokens = 0  # step at which this run begins, and the tokens seen until then
        self._plan = Accumulation((0,), (1,))
        self._tokens_at_once = 0  # in one micro-batch, summed over all processes

    def planned_steps(self, trainer: Any, datamodule: Any) -> int | None:
        """The length of a new run, before its processes are up; None where a checkpoint will tell.

        Raises:
            UsageError: see the class.
        """
        self._check(trainer)
        strategy = getattr(trainer, "strategy", None)
        world = planned_data_ranks(strategy, trainer.num_devices, trainer.num_nodes)
        plan, at_once = _plan(trainer, datamodule, world), self._micro_batch(datamodule) * world
        return None if self.resumes else plan.steps_of_epoch(0, math.ceil(self.total_tokens / at_once))

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run whose options do not tell its tokens, before any process is started."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._check(trainer)
        if not trainer.lightning_module.automatic_optimization:
            raise UsageError(
                f"total_tokens={self.total_tokens}: the steps of manual optimization do not tell their tokens: set "
                "trainer.max_steps"
            )
        self._micro_batch(datamodule)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Limit a new run."""
        self._trainer = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._limit.close()  # of a fit that failed
        data, world = trainer.datamodule, data_rank(trainer)[1]  # type: ignore[attr-defined]
        self.check_run(trainer, data, stage)
        self._trainer = trainer
        seen = self.tokens_at(trainer.global_step)  # in an earlier fit of this Trainer
        self._step, self._tokens = trainer.global_step, seen
        self._tokens_at_once = self._micro_batch(data) * world
        self._plan = _plan(trainer, data, world)
        self._set_limit()

    def _check(self, trainer: Any) -> None:
        name = f"total_tokens={self.total_tokens}"
        if trainer.max_steps != -1:
            raise UsageError(f"{name} and trainer.max_steps={trainer.max_steps}: give one of them")
        refuse_accumulation_of_others(trainer, name, "take BatchSizeWarmup, or set trainer.max_steps")

    def _micro_batch(self, data: Any) -> int:
        """Tokens in one micro-batch of one process."""
        if self.micro_batch_tokens is not None:
            return int(self.micro_batch_tokens)
        _, tokens = micro_batch(data)
        if tokens is None or tokens < 1:
            raise UsageError(
                f"total_tokens={self.total_tokens}: the data do not tell the tokens of a micro-batch: give "
                "TotalTokens(micro_batch_tokens=...), or a data module with seq_len and micro_batch_size"
            )
        return tokens

    def tokens_at(self, step: int) -> int:
        """Tokens that this run and the runs before it have seen when `trainer.global_step` is `step`."""
        return self._tokens + self._between(self._step, step)

    def _between(self, first: int, end: int) -> int:
        """Tokens of the steps from `first` on and before `end`, with the batches of this run."""
        return (self._plan.before(end) - self._plan.before(first)) * self._tokens_at_once

    def _steps(self) -> int:
        left = max(math.ceil((self.total_tokens - self._tokens) / self._tokens_at_once), 0)  # micro-batches
        return self._step + self._plan.steps_of_epoch(self._step, left)

    def _set_limit(self) -> None:
        self._limit.close()
        self._limit.enter_context(replaced(*step_limit(self._trainer), self._steps()))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Count on from the checkpoint's tokens."""
        if self._trainer is None:
            return
        step = int(checkpoint["global_step"])
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        tokens = state["tokens"] if state else _tokens_of_data(data, checkpoint, step)
        self._step, self._tokens = step, self._between(0, step) if tokens is None else tokens
        self._set_limit()
        if self._tokens >= self.total_tokens:
            rank_zero_info(
                f"total_tokens={self.total_tokens:,}: the checkpoint has seen {self._tokens:,}; give more to go on"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Print how many steps the tokens are."""
        if self._trainer is not None:
            seen = f"{self._tokens:,} seen at step {self._step}, " if self._step else ""
            steps = self._steps()
            sizes = {self._between(step, step + 1) for step in (self._step, max(steps - 1, self._step))}
            in_a_step = " to ".join(f"{size:,}" for size in sorted(sizes))
            rank_zero_info(f"total_tokens={self.total_tokens:,}: {seen}{in_a_step} in a step, ends with step {steps}")

    def state_dict(self) -> dict[str, Any]:
        """The tokens seen so far, by all processes."""
        return {} if self._trainer is None else {"tokens": self.tokens_at(self._trainer.global_step)}

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the Trainer its own limit back."""
        self._limit.close()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Give the Trainer its own limit back."""
        self._limit.close()


def _plan(trainer: Any, data: Any, world: int) -> Accumulation:
    """The micro-batches of each step of a run that has not begun."""
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeWarmup):
            return callback.planned(trainer, data, world)
    return Accumulation((0,), (int(trainer.accumulate_grad_batches),))


def _tokens_of_data(data: Any, checkpoint: dict[str, Any], step: int) -> int | None:
    """Tokens that the steps of a checkpoint took, from the position of the data in it; None where it does not tell."""
    state = checkpoint.get(type(data).__qualname__)
    if not isinstance(state, dict) or not hasattr(data, "rows_of_steps"):
        return None
    rows = data.rows_of_steps(step, state)
    return None if rows is None else rows * state["seq_len"]
