"""The position of a run in its data: the rows consumed at the last optimizer step, and the rows of the next ones.

A step takes the next global batch of rows, however that is split into processes and micro-batches, so that any split
resumes any other. Lightning's own batch counters do not suffice: they depend on the number of processes and on how many
micro-batches of an incomplete step were done when the checkpoint was written.
"""

import warnings
from typing import Any

import numpy as np

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks._trainer import batch_progress, data_rank, is_restarting
from lightning_tricks.data.batch_history import BatchHistory, Span
from lightning_tricks.data.skipped_samples import SkippedSamples

ENDLESS = 1 << 48  # steps: more than any run takes, and a range of them costs nothing


def micro_batch_positions(
    start: int, steps: int, micro_batches: int, micro_batch_size: int, rank: int = 0, world: int = 1
) -> range:
    """Position of the first row of each of this process's micro-batches.

    From `start` on, each step takes `world * micro_batches * micro_batch_size` consecutive positions, of which
    micro-batch m of rank r takes `micro_batch_size` from `(m * world + r) * micro_batch_size` on.

    Returns:
        `steps * micro_batches` positions, `world * micro_batch_size` apart.
    """
    first, stride = start + rank * micro_batch_size, world * micro_batch_size
    return range(first, first + steps * micro_batches * stride, stride)


def steps_done(trainer: pl.Trainer) -> int:
    """Optimizer steps done in this run and those it was resumed from (micro-batches under manual optimization)."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return batch_progress(trainer).total.processed


def steps_to_come(trainer: pl.Trainer, steps_in_pass: int) -> int:
    """Steps that the loader should serve now: to `max_steps`; else to the end of this pass over the data; else no end.

    The loader has to know the end: Lightning validates after the last batch only if it sees that batch coming.
    """
    done = steps_done(trainer)
    if trainer.max_steps >= 0 and trainer.lightning_module.automatic_optimization:
        return max(trainer.max_steps - done, 0)
    if trainer.max_steps < 0 and (trainer.max_epochs or 0) > 0:
        return steps_in_pass - done % steps_in_pass
    return ENDLESS


def align_accumulation(trainer: pl.Trainer, saved_micro_batches: int) -> None:
    """After a restart, put Lightning's batch counters back to the last whole step.

    A checkpoint holds the number of micro-batches of an incomplete step, but not their gradients. Lightning would
    accumulate only the rest of that step, and all later steps would be out of phase. Such checkpoints exist: a resumed
    ModelCheckpoint saves again at its first micro-batch. Call it when the fit loop has loaded its state and has not yet
    run, with the number of micro-batches per step in the run that wrote the checkpoint.
    """
    progress = batch_progress(trainer)
    if trainer.max_steps > trainer.global_step and trainer.limit_train_batches == 1.0:
        progress.is_last_batch = False  # it was the last of a shorter run
    if progress.is_last_batch:
        return  # Lightning begins a new epoch, whose counters are 0
    steps, rest = divmod(progress.current.ready, saved_micro_batches)
    shift = steps * trainer.accumulate_grad_batches - progress.current.ready
    for tracker in (progress.current, progress.total):
        ready = tracker.ready
        for name, number in vars(tracker).copy().items():
            # the step before an incomplete one is wholly done: Lightning shall repeat none of its hooks
            setattr(tracker, name, (ready if rest else number) + shift)


class DataPosition:
    """Rows consumed, as a function of the optimizer step; saved and loaded with the checkpoint.

    Args:
        micro_batch_size: rows in one micro-batch of one process.
        identity: settings on which the meaning of a position depends (seed, data, seq_len). A checkpoint with other
            ones causes a warning, and the recipe's are used.
        skipped: sample positions to pass over. Rows are counted without them; a checkpoint holds the position of the
            next row, so that the run that goes on may pass over others.
    """

    def __init__(self, micro_batch_size: int, identity: dict[str, Any], skipped: SkippedSamples) -> None:
        self.micro_batch_size, self.identity, self.skipped = micro_batch_size, identity, skipped
        self._loaded: dict[str, Any] | None = None
        self._rows = self._steps = 0  # consumed when this run began, and its first step
        self._history = BatchHistory()  # of the runs that this one goes on from
        self._since, self._begun = 0, False  # step from which this run takes these data, and whether it has begun

    def rows_per_step(self, trainer: pl.Trainer) -> int:
        """Rows that all processes together take for one step."""
        return self.micro_batch_size * data_rank(trainer)[1] * trainer.accumulate_grad_batches

    def rows(self, trainer: pl.Trainer) -> int:
        """Rows consumed at the last completed step; 0 while overfitting, which takes the same batches every epoch."""
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return 0
        return self._rows + (steps_done(trainer) - self._steps) * self.rows_per_step(trainer)

    def state_dict(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The state from which a later run goes on with the next row, however it splits the global batch."""
        state = {"samples": self._position(self.rows(trainer)), "micro_batches": trainer.accumulate_grad_batches}
        return {**state, "history": self.history(trainer).state(), **self.identity}

    def history(self, trainer: pl.Trainer) -> BatchHistory:
        """The samples of each step of this run and those before it; empty while overfitting."""
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return BatchHistory()
        rows = self.rows_per_step(trainer)
        first = self._position(self._rows + (self._since - self._steps) * rows)
        return self._history.extended(Span(self._since, first, rows, self.skipped.ranges))

    def _position(self, index: int) -> int:
        (position,) = self.skipped.positions(np.array([index])).tolist()
        return position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for the next `begin`, by which time Lightning has restored its own counters too."""
        self._loaded = state

    def begin(self, trainer: pl.Trainer) -> None:
        """Fix where this run starts; call when the training loader is asked for."""
        if (state := self._loaded) is None:
            if is_restarting(trainer):
                # a checkpoint of other data: its steps count as if they had been made with this global batch
                align_accumulation(trainer, trainer.accumulate_grad_batches)
                if not self._begun:
                    self._since = steps_done(trainer)
            self._begun = True
            return
        self._loaded, self._begun = None, True
        align_accumulation(trainer, state["micro_batches"])
        self._rows = self.skipped.index(state["samples"])
        self._steps = self._since = steps_done(trainer)
        changed = self._changed(state)
        self._history = BatchHistory() if changed else BatchHistory.of_state(state.get("history", []))
        if changed:
            warnings.warn(
                f"The checkpoint's batches came from other data settings ({', '.join(changed)}); the recipe's are "
                "used, so rows may repeat or be left out in this pass.",
                stacklevel=2,
            )

    def _changed(self, state: dict[str, Any]) -> list[str]:
        """The settings of a checkpoint's data that are not these."""
        return [f"{key} {state.get(key)} -> {now}" for key, now in self.identity.items() if state.get(key) != now]

    def samples_of_step(self, step: int, state: dict[str, Any]) -> list[tuple[int, int]]:
        """See `ShardData.samples_of_step`."""
        if changed := self._changed(state):
            raise UsageError(
                f"the checkpoint's batches came from other data settings ({', '.join(changed)}): give the recipe and "
                "the data of its run"
            )
        return BatchHistory.of_state(state.get("history", [])).runs(step)

    def step_samples(self, trainer: pl.Trainer) -> list[tuple[int, int]] | None:
        """First and last position of each run of samples in the step after the last completed one.

        None while overfitting, when the step does not tell the samples.
        """
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return None
        return self.skipped.runs(self.rows(trainer), self.rows_per_step(trainer))

    def steps_in_pass(self, trainer: pl.Trainer, windows: int) -> int:
        """Whole steps in a pass of `windows` rows, at least one."""
        return max(windows // self.rows_per_step(trainer), 1)

    def positions(self, trainer: pl.Trainer, windows: int) -> range:
        """First rows of this process's micro-batches from the last completed step on; a pass has `windows` rows."""
        (rank, world), micro_batches = data_rank(trainer), trainer.accumulate_grad_batches
        steps = steps_to_come(trainer, self.steps_in_pass(trainer, windows))
        return micro_batch_positions(self.rows(trainer), steps, micro_batches, self.micro_batch_size, rank, world)
