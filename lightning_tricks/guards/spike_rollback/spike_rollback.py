"""Go back to earlier weights where the loss stays too high, and on with the next data.

StepGuard skips a single step before it does harm. Here the harm is done: bad data have destroyed the weights, slowly or
by one accepted update. Earlier weights come back from a copy, and the data that did the harm are passed over.
"""

import math
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl, rank_zero_info, rank_zero_warn
from lightning_tricks._samples import step_samples
from lightning_tricks._trainer import is_accumulating
from lightning_tricks.guards.spike_rollback.from_disk import SavedStates, folders_of
from lightning_tricks.guards.spike_rollback.passed_over import PassedOver, tell_callbacks
from lightning_tricks.guards.spike_rollback.refusals import check_options, check_run
from lightning_tricks.guards.spike_rollback.rollbacks import Rollback, in_words, is_good, remembered, write_from_rank_0
from lightning_tricks.guards.spike_rollback.snapshot_ring import SnapshotRing
from lightning_tricks.guards.spike_rollback.spike_detector import SpikeDetector
from lightning_tricks.guards.spike_rollback.step_losses import StepLosses
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row


class SpikeRollback(pl.Callback):
    """Changes training: where the loss stays too high, weights and optimizer go back to an earlier state.

    A spike is a loss that is NaN, infinite, or more than `sigmas` standard deviations above the mean of the last
    `window_steps` accepted steps, for `patience_steps` steps in a row up to a log step, where the mean over all ranks
    is read. The state comes from the newest copy in the host's memory that was made before the spike; where there is
    none, from the newest finite checkpoint of this run from before it. The steps since then are undone and their data
    passed over: data, counters and schedule go on, so the next batch is the one that would have come. Each repeat goes
    back further. One line tells what was done; `guard/rollbacks` is their number.

    Checkpoints remember the rollbacks, and so does `rollbacks.json` beside them: a run that goes on from an earlier
    checkpoint comes to the same data, makes those steps without an update, and is then the same run to the bit.

    Every process copies its own shards. A callback with a method `after_rollback()` is told, as StepGuard is, also at
    the end of such steps.

    Args:
        patience_steps: steps in a row out of bounds; 10, at which StepGuard stops a run that nobody repairs.
        sigmas: standard deviations above the mean at which a loss is out of bounds; above 0.
        window_steps: accepted steps over which mean and deviation are taken. Finite losses can be out of bounds from
            half of them on.
        snapshot_every_n_steps: optimizer steps between copies, rounded up to a log step; 100, as PaLM went back about
            100 steps. A copy is made only if the loss is within bounds.
        keep_snapshots: copies in memory, each as large as weights, buffers and optimizer state of one process; 0: go
            back to checkpoints only.
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
        check_options(self)
        self._loaded: dict[str, Any] = {}  # the state of a checkpoint, for the next fit
        self._trainer: Any = None
        self._passed_over = PassedOver()
        self._forget()

    def _forget(self) -> None:
        """Reset the state that belongs to one fit."""
        self._rollbacks: list[Rollback] = []
        self._run = ""  # tells the rollbacks of this run from those of others in one folder
        self._detector = SpikeDetector(self.patience_steps, self.sigmas, self.window_steps)
        self._ring, self._copied_at = SnapshotRing(self.keep_snapshots), 0
        self._passed_over.drop()
        self._losses = StepLosses()
        self._at_step_end = self._said_size = False
        self._reason_to_stop = ""

    # ---- start

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a run that cannot go back; find the buffer."""
        check_run(self, trainer)
        self._forget()
        self._trainer, self._buffer = trainer, MetricBuffer.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Go on with the checkpoint's detector and rollbacks; copy the first state."""
        self._buffer.at_flush(self._judge)  # after StepGuard's, which may find a reason to stop in the same interval
        self._saved = SavedStates(trainer)
        loaded, self._loaded = self._loaded, {}
        if "detector" in loaded:
            self._detector.load_state_dict(loaded["detector"])
        self._run, self._rollbacks, unknown = remembered(trainer, loaded)
        if any(rollback.spike_step <= trainer.global_step < rollback.end_step for rollback in unknown):
            self._leave_spike(trainer)
        self._copy(trainer, pl_module)

    def _leave_spike(self, trainer: Any) -> None:
        """Take the weights of an earlier checkpoint where the one that the run goes on from is from within a spike."""
        found = self._saved.restore_newest(lambda step: is_good(step, trainer.global_step, self._rollbacks))
        if found is None:
            raise UsageError(
                f"ckpt_path={trainer.ckpt_path}: it was saved in a spike, and a rollback has undone its steps "
                f"({in_words(self._rollbacks)}): go on from a checkpoint from before it or from after it"
            )
        self._take_detector(found[1])
        rank_zero_warn(
            f"SpikeRollback: {trainer.ckpt_path} was saved in a spike that a rollback has undone: weights and "
            f"optimizer are those of {found[0]}"
        )

    # ---- each batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Roll back if values that were read since the last step ask for it; pass over a step that was undone."""
        self._at_step_end = False
        if self._detector.spiking and not (self._losses.within_step or self._passed_over.active):
            self._roll_back(trainer, pl_module)
        if self._reason_to_stop:
            raise UsageError(self._reason_to_stop)
        if self._comes_again(trainer):
            self._passed_over.begin_batch(trainer, pl_module)
        self._losses.begin(trainer)

    def _comes_again(self, trainer: Any) -> bool:
        """Whether the step that is not done yet is one that a rollback undid, in a run that was resumed before it."""
        samples = step_samples(trainer) if self._rollbacks else None
        return any(rollback.passes_over(trainer.global_step, samples) for rollback in self._rollbacks)

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Keep the loss."""
        self._losses.add(trainer, loss)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the step's loss; the buffer, whose hook comes later, may read it at once."""
        self._passed_over.end_batch()
        if is_accumulating(trainer):
            return
        self._at_step_end = True
        if not self._passed_over.active:
            self._losses.record(trainer, self._buffer)
        elif not self._comes_again(trainer):
            self._passed_over.end(trainer, pl_module)
        self._losses.drop()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Values that are read from now on are acted on when the next step begins."""
        self._at_step_end = False

    def _judge(self, rows: list[Row]) -> dict[str, float]:
        """Judge the losses of an interval, and act if its last step is just done and training has not failed."""
        for step, loss in self._losses.read(rows):
            self._detector.take(step, loss)
        if self._at_step_end and not self._buffer.failed:
            self._act(self._trainer, self._trainer.lightning_module)
        return {"guard/rollbacks": float(len(self._rollbacks))}

    def _act(self, trainer: Any, pl_module: Any) -> None:
        """Roll back, or copy the state if it is time."""
        self._at_step_end = False
        if self._passed_over.active or self._reason_to_stop:
            return
        if self._detector.spiking:
            self._roll_back(trainer, pl_module)
        elif not self._detector.in_a_row and trainer.global_step - self._copied_at >= self.snapshot_every_n_steps:
            self._copy(trainer, pl_module)

    def _copy(self, trainer: Any, pl_module: Any) -> None:
        self._copied_at = trainer.global_step
        taken = self._ring.take(trainer, pl_module, _next_sample(trainer), self._detector.state_dict())
        if taken and not self._said_size and any(optimizer.state for optimizer in trainer.optimizers):
            self._said_size = True
            rank_zero_info(
                f"SpikeRollback: a copy of weights and optimizer takes {taken.state.size / 2**30:.3g} GiB of each "
                f"process's host memory, and keep_snapshots={self.keep_snapshots} of them stay"
            )

    # ---- rollback

    def _roll_back(self, trainer: Any, pl_module: Any) -> None:
        spike, now = self._detector.first_step, trainer.global_step
        what = f"loss {self._detector.loss:.4g} above {self._detector.limit:.4g}"
        what = (
            what if math.isfinite(self._detector.loss) else "loss not finite"
        ) + f", out of bounds since step {spike}"
        if len(self._rollbacks) >= self.max_rollbacks:
            self._stop(
                f"max_rollbacks={self.max_rollbacks}: {what}, after rollbacks that undid {in_words(self._rollbacks)}"
            )
            return

        def good(step: int) -> bool:
            return is_good(step, spike, self._rollbacks)

        if copied := self._ring.newest(good):
            copied.state.restore(trainer, pl_module)
            self._detector.load_state_dict(copied.detector)
            self._detector.in_a_row = 0
            source, first, sample = "memory", copied.step, copied.sample
        elif found := self._saved.restore_newest(good):
            source, first, sample = str(found[0]), int(found[1]["global_step"]), self._take_detector(found[1])
        else:
            before = f"; rollbacks have undone {in_words(self._rollbacks)}" if self._rollbacks else ""
            places = ", ".join(map(str, folders_of(trainer))) or "no folder"
            self._stop(
                f"keep_snapshots={self.keep_snapshots}: {what}, and no copy in memory nor finite checkpoint in "
                f"{places} is from before it{before}"
            )
            return
        following = _next_sample(trainer)
        samples = None if sample is None or following is None or following <= sample else [sample, following - 1]
        self._finish(trainer, Rollback(first, spike, now, source, samples), what)

    def _finish(self, trainer: Any, rollback: Rollback, what: str) -> None:
        """Remember a rollback that is done, and tell everyone."""
        self._rollbacks.append(rollback)
        self._ring.keep(lambda step: is_good(step, rollback.end_step, self._rollbacks))
        self._copied_at = rollback.end_step
        write_from_rank_0(trainer, folders_of(trainer), self._run, self._rollbacks)
        tell_callbacks(trainer)
        rank_zero_warn(
            f"SpikeRollback: step {rollback.end_step}: {what}: weights and optimizer are those of step "
            f"{rollback.first_step} again, from {rollback.source}; passed over: {rollback.in_words()}. Rollback "
            f"{len(self._rollbacks)} of at most {self.max_rollbacks}"
        )

    def _stop(self, why: str) -> None:
        self._reason_to_stop = (
            f"SpikeRollback.{why}. Go on from a checkpoint from before it with a lower lr, with data.skip_samples, or "
            "with a higher limit"
        )

    def _take_detector(self, checkpoint: dict[str, Any]) -> int | None:
        """Go on with the detector of a checkpoint, if it has one; returns the position of its next sample."""
        own = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if "detector" in own:
            self._detector.load_state_dict(own["detector"])
        self._detector.in_a_row = 0
        sample: int | None = own.get("next_sample")
        return sample

    # ---- end, checkpoints

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Forget micro-batches that no optimizer step followed."""
        self._losses.drop()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Put back the state where the last step was passed over."""
        self._passed_over.end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Put the optimizers' methods back."""
        self._passed_over.end_batch()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Free the copies."""
        self._ring = SnapshotRing(self.keep_snapshots)
        self._passed_over.drop()

    def state_dict(self) -> dict[str, Any]:
        """The detector, the rollbacks, and where the data stand; every rank must call."""
        if not self._run:
            return self._loaded
        self._at_step_end = False  # what is being saved shall not change meanwhile
        self._buffer.flush()
        return {
            "run": self._run,
            "rollbacks": [asdict(rollback) for rollback in self._rollbacks],
            "detector": self._detector.state_dict(),
            "next_sample": _next_sample(self._trainer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them in the next fit."""
        self._loaded = state_dict


def _next_sample(trainer: Any) -> int | None:
    """Position of the first sample of the step that is not done yet; None for data without positions."""
    samples = step_samples(trainer)
    return samples[0][0] if samples else None
