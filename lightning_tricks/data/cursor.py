"""The cursor of a run in its data: the rows consumed at the last optimizer step, and the rows of the next ones.

A step takes the next global batch of rows, however that is split into processes and micro-batches, so that any split
resumes any other. Lightning's own batch counters do not suffice: they depend on the number of processes and on how many
micro-batches of an incomplete step were done when the checkpoint was written.

A checkpoint holds the samples of each step of the run, over resumes that changed the global batch or passed over
samples, as spans: steps in a row that took equally many samples. A run that never changed has one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_tricks._core.accumulation import accumulation, micro_batches_in_step
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_tricks._trainer.loop import batch_progress, is_restarting, steps_in_epoch
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.run_facts import data_rank
from lightning_tricks.data.order import SkippedSamples

Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Span:
    """Optimizer steps in a row that took equally many samples."""

    step: int  # steps done before its first one
    sample: int  # position of its first sample
    rows: int  # samples of one step, of all ranks and micro-batches together
    skipped: Sequence[Sequence[int]] = ()  # ranges of positions that it passed over, first and last of each

    def runs(self, step: int) -> Runs:
        """First and last position of each unbroken run of samples in a step; the first step of all is 0."""
        skipped = SkippedSamples(self.skipped)
        return skipped.runs(skipped.row(self.sample) + (step - self.step) * self.rows, self.rows)

    def goes_on_from(self, before: "Span") -> bool:
        """Whether `before` would have taken the same samples."""
        ranges = [SkippedSamples(span.skipped).ranges for span in (before, self)]  # a checkpoint has lists for tuples
        return before.rows == self.rows and ranges[0] == ranges[1] and before.runs(self.step) == self.runs(self.step)


class BatchHistory:
    """The spans of a run, by their first step; a step belongs to the last one that has begun."""

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self.spans = list(spans)

    @classmethod
    def of_state(cls, state: Sequence[dict[str, Any]]) -> "BatchHistory":
        """The history in a checkpoint; see `state`."""
        return cls([Span(**span) for span in state])

    def extended(self, span: Span) -> "BatchHistory":
        """The history of a run that went on with `span`."""
        spans = [before for before in self.spans if before.step < span.step]
        return BatchHistory(spans if spans and span.goes_on_from(spans[-1]) else [*spans, span])

    def state(self) -> list[dict[str, Any]]:
        """The spans in plain types, for a checkpoint."""
        return [asdict(span) | {"skipped": [list(pair) for pair in span.skipped]} for span in self.spans]

    def rows(self, steps: int) -> int | None:
        """Samples that the first `steps` steps took; None where the spans do not begin with the first of all."""
        if not self.spans or self.spans[0].step:
            return None
        ends = [*(span.step for span in self.spans[1:]), steps]
        lengths = (min(end, steps) - span.step for span, end in zip(self.spans, ends, strict=True))
        return sum(span.rows * max(length, 0) for span, length in zip(self.spans, lengths, strict=True))

    def rows_taken_before(self, position: int) -> int:
        """Samples that were taken when `position` is that of the next: without those that a span has passed over.

        Of the time before the first span nothing is known: there, each position counts as taken.
        """
        places = [*(min(span.sample, position) for span in self.spans), position]
        before = places[0] if not self.spans or self.spans[0].step else 0
        parts = zip(self.spans, places, places[1:], strict=False)
        return before + sum(
            skipped.row(end) - skipped.row(first)
            for span, first, end in parts
            for skipped in [SkippedSamples(span.skipped)]
        )

    def batch_size_before(self, step: int) -> int | None:
        """Samples of the last step before `step`; None where it is not known."""
        return next((span.rows for span in reversed(self.spans) if span.step < step), None)

    def runs(self, step: int) -> Runs:
        """See `Span.runs`.

        Raises:
            UsageError: no span has the step.
        """
        if not self.spans:
            raise UsageError(
                f"step={step}: the checkpoint does not tell the samples of any step: its run overfitted a few batches"
            )
        spans = [span for span in self.spans if span.step <= step]
        if not spans:
            first = self.spans[0].step
            before = "before it, the run took other data" if first else "as the logs count"
            raise UsageError(f"step={step}: the run took these data from step {first} on ({before}); give a later step")
        return spans[-1].runs(step)


ENDLESS = 1 << 48  # steps: more than any run takes, and a range of them costs nothing


def first_rows(
    start: int, steps: int, micro_batches: int, micro_batch_size: int, rank: int = 0, world: int = 1
) -> range:
    """The first row of each of this process's micro-batches.

    From row `start` on, each step takes `world * micro_batches * micro_batch_size` consecutive rows, of which
    micro-batch m of rank r takes `micro_batch_size` from `(m * world + r) * micro_batch_size` on.

    Returns:
        `steps * micro_batches` rows, `world * micro_batch_size` apart.
    """
    first, stride = start + rank * micro_batch_size, world * micro_batch_size
    return range(first, first + steps * micro_batches * stride, stride)


def steps_done(trainer: pl.Trainer) -> int:
    """Optimizer steps done in this run and those it was resumed from (micro-batches under manual optimization)."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return batch_progress(trainer).total.processed


class FirstRows:
    """First rows of this process's micro-batches up to the run's last step, which may change while they are served.

    `now` returns those up to the end of the run as it is known at the moment. Their first one never changes.
    """

    def __init__(self, now: Callable[[], range]) -> None:
        self._now = now

    def __iter__(self) -> Iterator[int]:
        index = 0
        while index < len(rows := self._now()):
            yield rows[index]
            index += 1

    def without_end(self) -> range:
        """The same rows and all after them, to be fetched ahead: the run's end may move there."""
        now = self._now()
        return range(now.start, now.start + ENDLESS * now.step, now.step)


def steps_to_come(trainer: pl.Trainer, pass_micro_batches: int, done: int | None = None) -> int:
    """Steps that the loader should serve: to `max_steps`; else to the end of this pass over the data; else no end.

    The loader has to know the end: Lightning validates after the last batch only if it sees that batch coming. Of a
    pass, whole steps are served, at least one. They are counted from the steps that are `done`, now if None.
    """
    done = steps_done(trainer) if done is None else done
    if trainer.max_steps >= 0 and trainer.lightning_module.automatic_optimization:
        return max(trainer.max_steps - done, 0)
    if trainer.max_steps < 0 and (trainer.max_epochs or 0) > 0:
        return accumulation(trainer).steps_to_end_of_pass(done, pass_micro_batches)
    return ENDLESS


def align_accumulation(trainer: pl.Trainer, saved_micro_batches: int, in_step: int | None = None) -> None:
    """After a restart, put Lightning's batch counters back to the last whole step.

    A checkpoint holds the number of micro-batches of an incomplete step, but not their gradients. Lightning would
    accumulate only the rest of that step, and all later steps would be out of phase. Such checkpoints exist: a resumed
    ModelCheckpoint saves again at its first micro-batch. Call it when the fit loop has loaded its state and has not yet
    run. The run that wrote the checkpoint had `saved_micro_batches` per step; if their number grew in that run, its
    incomplete step had `in_step`.
    """
    progress = batch_progress(trainer)
    if trainer.max_steps > trainer.global_step and trainer.limit_train_batches == 1.0:
        progress.is_last_batch = False  # it was the last of a shorter run
    if progress.is_last_batch:
        return  # Lightning begins a new epoch, whose counters are 0
    steps, rest = divmod(progress.current.ready, saved_micro_batches)
    if in_step is not None:
        steps, rest = steps_in_epoch(trainer), in_step
    plan, done = accumulation(trainer), steps_done(trainer)
    if len(plan.starts) == 1:
        micro_batches = steps * plan.micro_batches[0]
    else:
        micro_batches = plan.before(done) - plan.before(max(done - steps, 0))
    shift = micro_batches - progress.current.ready
    for tracker in (progress.current, progress.total):
        ready = tracker.ready
        for name, number in vars(tracker).copy().items():
            # the step before an incomplete one is wholly done: Lightning shall repeat none of its hooks
            setattr(tracker, name, (ready if rest else number) + shift)


def refuse_scheduled_accumulation(trainer: pl.Trainer) -> None:
    """Refuse Lightning's GradientAccumulationScheduler: the step alone would not tell the rows consumed.

    Raises:
        UsageError: the Trainer has one with several numbers of micro-batches.
    """
    for callback in getattr(trainer, "callbacks", ()):
        if is_a(callback, "GradientAccumulationScheduler") and len(set(callback.scheduling.values())) > 1:
            raise UsageError(
                f"GradientAccumulationScheduler(scheduling={callback.scheduling}): rows would be left out or come "
                "again where the number of micro-batches changes; give BatchSizeWarmup, whose stages begin at steps"
            )


class DataCursor:
    """Rows consumed, as a function of the optimizer step; saved and loaded with the checkpoint.

    Args:
        micro_batch_size: rows in one micro-batch of one process.
        identity: settings on which the meaning of a position depends (seed, data, content, seq_len). A checkpoint with
            other ones causes a warning, and the recipe's are used.
        skipped: sample positions to pass over. Rows are counted without them; a checkpoint holds the position of the
            next row, so that the run that goes on may pass over others.
    """

    def __init__(self, micro_batch_size: int, identity: dict[str, Any], skipped: SkippedSamples) -> None:
        self.micro_batch_size, self.identity, self.skipped = micro_batch_size, identity, skipped
        self._loaded: dict[str, Any] | None = None
        self._rows = self._steps = 0  # consumed when this run began, and its first step
        self._history = BatchHistory()  # of the runs that this one goes on from
        self._since, self._begun = 0, False  # step from which this run takes these data, and whether it has begun

    def rows_at_once(self, trainer: pl.Trainer) -> int:
        """Rows of one micro-batch of all processes together."""
        return self.micro_batch_size * data_rank(trainer)[1]

    def rows(self, trainer: pl.Trainer) -> int:
        """Rows consumed at the last completed step; 0 while overfitting, which takes the same batches every epoch."""
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return 0
        return self._rows_before(trainer, steps_done(trainer))

    def _rows_before(self, trainer: pl.Trainer, step: int) -> int:
        plan = accumulation(trainer)
        return self._rows + (plan.before(step) - plan.before(self._steps)) * self.rows_at_once(trainer)

    def state_dict(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The state from which a later run goes on with the next row, however it splits the global batch."""
        plan = accumulation(trainer)
        state = {"samples": self.position_of(self.rows(trainer)), "micro_batches": plan.at(steps_done(trainer))}
        if len(plan.starts) > 1:
            state["in_step"] = micro_batches_in_step(trainer, batch_progress(trainer).current.ready)
        return {**state, "history": self.history(trainer).state(), **self.identity}

    def history(self, trainer: pl.Trainer) -> BatchHistory:
        """The samples of each step of this run and those before it; empty while overfitting."""
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return BatchHistory()
        plan, at_once, history = accumulation(trainer), self.rows_at_once(trainer), self._history
        for start, end, number in zip(plan.starts, (*plan.starts[1:], ENDLESS), plan.micro_batches, strict=True):
            step = max(start, self._since)
            if step < end:
                first = self.position_of(self._rows_before(trainer, step))
                history = history.extended(Span(step, first, number * at_once, self.skipped.ranges))
        return history

    def position_at(self, trainer: pl.Trainer, step: int | None = None) -> int:
        """Position of the first sample after so many steps, from those done when this run began; now if None."""
        return self.position_of(self.rows(trainer) if step is None else self._rows_before(trainer, step))

    def position_of(self, row: int) -> int:
        """Position of the sample of a row."""
        (position,) = self.skipped.positions(np.array([row])).tolist()
        return position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for the next `begin`, by which time Lightning has restored its own counters too."""
        self._loaded = state

    def begin(self, trainer: pl.Trainer) -> None:
        """Fix where this run starts; call when the training loader is asked for.

        Raises:
            UsageError: see `refuse_scheduled_accumulation`.
        """
        refuse_scheduled_accumulation(trainer)
        if (state := self._loaded) is None:
            if is_restarting(trainer):
                # a checkpoint of other data: its steps count as if they had been made with this global batch
                align_accumulation(trainer, accumulation(trainer).at(steps_done(trainer)))
                if not self._begun:
                    self._since = steps_done(trainer)
            elif not steps_done(trainer):  # a new run, whatever these data have served before
                self._rows = self._steps = self._since = 0
                self._history = BatchHistory()
            self._begun = True
            return
        self._loaded, self._begun = None, True
        align_accumulation(trainer, state["micro_batches"], state.get("in_step"))
        self._rows = self.skipped.row(state["samples"])
        self._steps = self._since = steps_done(trainer)
        changed = self._changed(state)
        self._history = BatchHistory() if changed else BatchHistory.of_state(state["history"])
        before = self._history.batch_size_before(self._steps)
        now = accumulation(trainer).at(max(self._steps - 1, 0)) * self.rows_at_once(trainer)
        if before not in (None, now):
            rank_zero_info(
                f"From step {self._steps} on, a step has {now} rows; in the checkpoint's run it had {before}"
            )
        if changed:
            rank_zero_warn(
                f"The checkpoint's batches came from other data settings ({', '.join(changed)}); the recipe's are "
                "used, so rows may repeat or be left out in this pass."
            )

    def _changed(self, state: dict[str, Any]) -> list[str]:
        """The settings in which a checkpoint's data differ from these, such as `seed 0 -> 1`."""
        return [f"{key} {state.get(key)} -> {now}" for key, now in self.identity.items() if state.get(key) != now]

    def samples_of_step(self, step: int, state: dict[str, Any]) -> list[tuple[int, int]]:
        """See `TokenDataModule.samples_of_step`."""
        if changed := self._changed(state):
            raise UsageError(
                f"the checkpoint's batches came from other data settings ({', '.join(changed)}): give the recipe and "
                "the data of its run"
            )
        return BatchHistory.of_state(state["history"]).runs(step)

    def step_samples(self, trainer: pl.Trainer) -> list[tuple[int, int]] | None:
        """First and last position of each run of samples in the step after the last completed one.

        None while overfitting, when the step does not tell the samples.
        """
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return None
        plan, at_once, done = accumulation(trainer), self.rows_at_once(trainer), steps_done(trainer)
        first = self._rows + (plan.before(done) - plan.before(self._steps)) * at_once
        return self.skipped.runs(first, plan.at(done) * at_once)  # each asked once: callbacks want it in every step

    def first_rows(self, trainer: pl.Trainer, windows: int) -> FirstRows:
        """First rows of this process's micro-batches from the last completed step on; a pass has `windows` rows."""
        (rank, world), plan, rows = data_rank(trainer), accumulation(trainer), self.rows(trainer)
        done, in_pass = steps_done(trainer), windows // self.rows_at_once(trainer)

        def now() -> range:
            number = plan.before(done + steps_to_come(trainer, in_pass, done)) - plan.before(done)
            return first_rows(rows, number, 1, self.micro_batch_size, rank, world)

        return FirstRows(now)
