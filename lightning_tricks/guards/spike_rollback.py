"""Go back to earlier weights where the loss stays too high, and on with the next data.

StepGuard skips a single step before it does harm. Here the harm is done: bad data have destroyed the weights, slowly or
by one accepted update. Earlier weights come back from a copy, and the data that did the harm are passed over.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import FollowsRollback
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer.loop import is_accumulating, logging_step
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.refusals import UNREADABLE, Refusal
from lightning_tricks._trainer.run_facts import samples_in_words, step_samples
from lightning_tricks._trainer.saves import may_save
from lightning_tricks.guards.earlier_states import SavedStates, SnapshotRing, folders_of
from lightning_tricks.guards.outlier_window import SpikeDetector
from lightning_tricks.guards.preemption import save
from lightning_tricks.guards.step_guard import StepGuard, refuse_lbfgs
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import LOSS

__all__ = ["SpikeRollback"]

_REFUSED = Refusal(
    UNREADABLE,
    "{strategy} keeps weights and optimizer state where they cannot be put back: take SpikeRollback out, or shard "
    "with FSDP2Strategy",
)

_LEAST = {"patience_steps": 1, "window_steps": 4, "snapshot_every_n_steps": 1, "keep_snapshots": 0, "max_rollbacks": 1}


@dataclass(frozen=True)
class Rollback:
    """One return to earlier weights. Steps are `trainer.global_step` before the step is made.

    Args:
        first_step: the first step that is undone: weights and optimizer are again as they were before it.
        spike_step: the first step whose loss was out of bounds.
        end_step: the step with which the run went on.
        source: where the state came from, `memory` or the path of a checkpoint.
        samples: first and last sample position of the undone steps; None for data without positions.
    """

    first_step: int
    spike_step: int
    end_step: int
    source: str
    samples: list[int] | None = None

    def __str__(self) -> str:
        """The undone steps, and their data."""
        data = f", samples {samples_in_words([(self.samples[0], self.samples[1])])}" if self.samples else ""
        return f"steps {self.first_step} to {self.end_step - 1}{data}"


def is_good(step: int, spike_step: int, rollbacks: Iterable[Rollback]) -> bool:
    """Whether the state before a step may be gone back to when the loss is out of bounds since `spike_step`.

    The loss that was computed with these weights must have been accepted, so the state before `spike_step` itself is
    none. States that an earlier rollback undid are none either, with the one that it restored: each repeat goes back
    further.
    """
    return step < spike_step and not any(one.first_step <= step < one.end_step for one in rollbacks)


class SpikeRollback(pl.Callback):
    """Changes training: where the loss stays too high, weights and optimizer go back to an earlier state.

    A spike is a loss that is NaN, infinite, or more than `sigmas` standard deviations above the mean of the last
    `window_steps` accepted steps, for `patience_steps` steps in a row up to a log step, where the mean over all ranks
    is read. The state comes from the newest copy in the host's memory that was made before the spike; where there is
    none, from the newest finite checkpoint of this run from before it. The steps since then are undone and their data
    passed over: data, counters and schedule go on, so the next batch is the one that would have come. Each repeat goes
    back further. One line tells what was done; `guard/rollbacks` is their number.

    Right after a rollback the run is saved, by its SafeCheckpoint or ModelCheckpoint, so that a run that goes on from
    its newest checkpoint goes on behind the spike. From an earlier one it comes to the same data again, and rolls back
    again.

    Every process copies its own shards. EMA and TailAverage go back with the weights. A callback with a method
    `after_rollback()` is told, as StepGuard is; what its `rollback_state()` returns, tensors and numbers, is copied
    with the weights and given back by `load_rollback_state(state)`. This callback moves behind the MetricBuffer, in
    front of the checkpoint callbacks.

    Args:
        patience_steps: steps in a row out of bounds; 10, at which StepGuard stops a run that nobody repairs.
        sigmas: standard deviations above the mean at which a loss is out of bounds; above 0.
        window_steps: accepted steps over which mean and deviation are taken. Finite losses can be out of bounds from
            half of them on.
        snapshot_every_n_steps: optimizer steps between copies, rounded up to a log step; 100, as PaLM went back about
            100 steps. A copy is made only if the loss is within bounds.
        keep_snapshots: copies in memory, each as large as weights, buffers, optimizer state and averages of one
            process; 0: go back to checkpoints only.
        max_rollbacks: the run stops where another one would follow.

    Raises:
        UsageError: an option out of its range; when training starts, logging is off, DeepSpeed, FSDP1, LBFGS, no copies
            and no checkpoints, or a StepGuard that stops before the patience ends; in training, a spike after
            `max_rollbacks`, or with nothing good to go back to.

    Source: Chowdhery et al. 2022 (PaLM), https://arxiv.org/abs/2204.02311, section 5.1: a restart from about 100 steps
        before the spike, with 200 to 500 batches skipped, after which the loss did not spike there again.
    """

    def __init__(
        self,
        patience_steps: int = 10,
        sigmas: float = 6.0,
        window_steps: int = 128,
        snapshot_every_n_steps: int = 100,
        keep_snapshots: int = 3,
        max_rollbacks: int = 5,
    ) -> None:
        self.patience_steps, self.sigmas, self.window_steps = patience_steps, sigmas, window_steps
        self.snapshot_every_n_steps, self.keep_snapshots = snapshot_every_n_steps, keep_snapshots
        self.max_rollbacks = max_rollbacks
        if not sigmas > 0:
            raise UsageError(f"SpikeRollback.sigmas={sigmas}: give a number of standard deviations above 0, such as 6")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(f"SpikeRollback.{name}={getattr(self, name)}: give {least} or more")
        self._loaded: dict[str, Any] = {}  # the state of a checkpoint, for the next fit
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one fit."""
        self._trainer: Any = None  # from the start of training on
        self._rollbacks: list[Rollback] = []
        self._detector = SpikeDetector(self.patience_steps, self.sigmas, self.window_steps)
        self._ring, self._copied_at = SnapshotRing(self.keep_snapshots), 0
        self._within_step = False
        self._begun: dict[int, int] = {}  # by logging step, `trainer.global_step` before it, of the steps not read yet
        self._read_up_to = -1  # logging step
        self._has_begun = self._is_unsaved = False

    # ---- start

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse a run that cannot go back, before any process is started."""
        if stage == "fit":
            self._refuse(trainer)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Drop the state of a checkpoint that was validated before this fit."""
        if stage == "fit":
            self._loaded = {}

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a run that cannot go back; find the buffer."""
        self._refuse(trainer)  # also by an optimizer that only now is there
        self._reset()
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._judge)
        self._buffer.step_loss()

    def _refuse(self, trainer: Any) -> None:
        if not trainer.log_every_n_steps:
            raise UsageError(
                "trainer.log_every_n_steps=0: SpikeRollback reads the losses at log steps; set it to 50, or take it out"
            )
        _REFUSED.check(trainer.strategy, "SpikeRollback:")
        refuse_lbfgs(trainer, "SpikeRollback")
        if not (self.keep_snapshots or trainer.checkpoint_callbacks or trainer.fast_dev_run):
            raise UsageError(
                "SpikeRollback.keep_snapshots=0: there are no checkpoints either to go back to; give 1 or more, or add "
                "SafeCheckpoint"
            )
        for other in trainer.callbacks:
            if is_a(other, "WeightAveraging", "StochasticWeightAveraging"):
                raise UsageError(
                    f"SpikeRollback: {type(other).__name__} would keep in its average the weights that are "
                    "undone: take EMA or TailAverage, which go back with the weights"
                )
            if isinstance(other, StepGuard) and other.max_skipped_steps < self.patience_steps:
                raise UsageError(
                    f"SpikeRollback.patience_steps={self.patience_steps}: StepGuard stops the run after "
                    f"max_skipped_steps={other.max_skipped_steps} steps in a row; give at most as many"
                )

    def on_train_start(self, trainer: Any, pl_module: Module) -> None:
        """Go on with the checkpoint's detector and rollbacks."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        place = others.index(self._buffer) + 1
        trainer.callbacks = [*others[:place], self, *others[place:]]  # a new list: Lightning iterates over the old one
        self._trainer, self._saved = trainer, SavedStates(trainer)
        loaded, self._loaded = self._loaded, {}
        self._rollbacks = [Rollback(**entry) for entry in loaded.get("rollbacks", [])]
        if "detector" in loaded:
            self._detector.load_state_dict(loaded["detector"])

    # ---- each batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Copy the first state; roll back if values read since the last step, as by a validation, ask for it."""
        if self._within_step:
            return
        if not self._has_begun:  # here, when averages stand that a checkpoint has brought
            self._has_begun = True
            self._copy(trainer, pl_module)
        if self._detector.spiking:
            self._roll_back(trainer, pl_module)
        self._within_step = True
        self._begun[logging_step(trainer)] = trainer.global_step

    def _judge(self, rows: list[Row]) -> dict[str, float]:
        """Judge the losses of an interval."""
        self._read_up_to = rows[-1].step
        for row in rows:
            step = self._begun.get(row.step)
            if step is not None and LOSS in row.values:
                self._detector.take(step, row.values[LOSS])
        self._begun = {row: step for row, step in self._begun.items() if row > self._read_up_to}
        follows = self._detector.spiking and len(self._rollbacks) < self.max_rollbacks and not self._buffer.failed
        return {"guard/rollbacks": float(len(self._rollbacks) + follows)}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Behind a step whose loss has been read, roll back or copy the state if it is time; save after a rollback."""
        if is_accumulating(trainer):
            return
        self._within_step = False
        is_time = trainer.global_step - self._copied_at >= self.snapshot_every_n_steps
        if self._detector.spiking:
            self._buffer.flush()  # StepGuard and we know of the last step then
        if self._detector.spiking:
            self._roll_back(trainer, pl_module)
        elif is_time and self._read_up_to == logging_step(trainer) and not self._detector.in_a_row:
            self._copy(trainer, pl_module)
        if self._is_unsaved and may_save(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save after a rollback, where a validation was due at its step: a resume would leave that one out."""
        if self._is_unsaved and may_save(trainer):
            self._save(trainer)

    def _copy(self, trainer: Any, pl_module: Any) -> None:
        self._copied_at = trainer.global_step
        self._ring.take(trainer, pl_module, _next_sample(trainer), self._detector.state_dict())

    # ---- rollback

    def _roll_back(self, trainer: Any, pl_module: Any) -> None:
        spike, now, detector = self._detector.first_step, trainer.global_step, self._detector
        what = f"loss {detector.loss:.4g} above {detector.limit:.4g}"
        what = (what if math.isfinite(detector.loss) else "loss not finite") + f", out of bounds since step {spike}"
        undone = "; ".join(map(str, self._rollbacks))
        if len(self._rollbacks) >= self.max_rollbacks:
            raise _stop(f"max_rollbacks={self.max_rollbacks}: {what}, after rollbacks that undid {undone}")

        def good(step: int) -> bool:
            return is_good(step, spike, self._rollbacks)

        if copied := self._ring.newest(good):
            copied.state.restore(trainer, pl_module)
            source, first, sample, state = "memory", copied.step, copied.sample, copied.detector
        elif found := self._saved.restore_newest(good):
            own = found[1].get("callbacks", {}).get(self.state_key, {})
            source, first = str(found[0]), int(found[1]["global_step"])
            sample, state = own.get("next_sample"), own.get("detector")
        else:
            places = ", ".join(map(str, folders_of(trainer))) or "no folder"
            raise _stop(
                f"keep_snapshots={self.keep_snapshots}: {what}, and no copy in memory nor finite checkpoint in "
                f"{places} is from before it" + (f"; rollbacks have undone {undone}" if undone else "")
            )
        if state is not None:
            detector.load_state_dict(state)
        detector.in_a_row = 0
        following = _next_sample(trainer)
        samples = None if sample is None or following is None or following <= sample else [sample, following - 1]
        rollback = Rollback(first, spike, now, source, samples)
        self._rollbacks.append(rollback)
        self._ring.keep(lambda taken: is_good(taken.step, now, self._rollbacks))
        self._copied_at, self._is_unsaved = now, True
        for callback in trainer.callbacks:
            if isinstance(callback, FollowsRollback):
                callback.after_rollback()
        rank_zero_warn(
            f"SpikeRollback: step {now}: {what}: weights and optimizer are those of step {first} again, from {source}; "
            f"skipped: {rollback}. Rollback {len(self._rollbacks)} of at most {self.max_rollbacks}"
        )

    def _save(self, trainer: Any) -> None:
        """Save the run behind a rollback as Preemption does, where it saves at all."""
        self._is_unsaved = False
        if trainer.fast_dev_run or not trainer.checkpoint_callbacks:
            return
        try:
            save(trainer, trainer.strategy.barrier)
        except OSError as error:
            if trainer.world_size > 1:  # the other ranks wait within the save
                raise
            rank_zero_warn(
                f"SpikeRollback: the state behind the rollback is not saved ({error}): a run that goes on from an "
                "earlier checkpoint comes to the spike again"
            )

    # ---- end, checkpoints

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Drop micro-batches that no optimizer step followed; save after a rollback at the epoch's last step."""
        self._within_step = False
        if self._is_unsaved:
            self._save(trainer)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Free the copies."""
        self._ring = SnapshotRing(self.keep_snapshots)

    def state_dict(self) -> dict[str, Any]:
        """The detector, the rollbacks, and where the data stand; every rank must call."""
        if self._trainer is None:
            return self._loaded
        self._buffer.flush()
        return {
            "rollbacks": [asdict(rollback) for rollback in self._rollbacks],
            "detector": self._detector.state_dict(),
            "next_sample": _next_sample(self._trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them in the next fit."""
        self._loaded = state_dict


def _stop(why: str) -> UsageError:
    return UsageError(
        f"SpikeRollback.{why}. Go on from a checkpoint from before it with a lower lr, with data.skip_samples, or with "
        "a higher limit"
    )


def _next_sample(trainer: Any) -> int | None:
    """Position of the first sample of the step that is not done yet; None for data without positions."""
    samples = step_samples(trainer)
    return samples[0][0] if samples else None
