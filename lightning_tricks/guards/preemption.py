"""Stop on request without losing a step: finish it, save once, leave with an exit code that says so."""

import atexit
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import SavesNow
from lightning_tricks._core.quote import say
from lightning_tricks._core.replaced import replaced
from lightning_tricks._host.exit import end_children
from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_warn
from lightning_tricks._trainer.loop import batch_progress, hook_at_epoch_end, is_accumulating, is_restarting
from lightning_tricks._trainer.processes import (
    dismiss_process_observer,
    launched_processes,
    signal_connector,
    sigterm_broadcast,
    slurm_checkpoint,
    slurm_environment,
)
from lightning_tricks._trainer.saves import may_save
from lightning_tricks.checkpoints.atomic_checkpoint_io import wait_for_write
from lightning_tricks.checkpoints.record import record_or_none
from lightning_tricks.checkpoints.write_file import clear_staging, put_in_place
from lightning_tricks.guards.stop_signals import Reason, StopSignals, deadline, job_id, requeue, shielded_workers

__all__ = ["Preemption"]

LAST = "last.ckpt"  # what Lightning's `ckpt_path="last"` and ours look for
_CHILDREN_SECONDS = 30.0  # for the processes of Lightning's launcher to leave, after this one has


class Preempted(SystemExit):
    """Raised by `Preemption` between two steps: the run is saved and ends its process.

    Args:
        code: of the process.
        step: optimizer steps done.
        checkpoint: path of the checkpoint to go on from: of an earlier step where `step` could not be saved, as on a
            full disk; empty where there is none.
    """

    def __init__(self, code: int, step: int, checkpoint: str) -> None:
        super().__init__(code)
        self.step, self.checkpoint = step, checkpoint


class Preemption(pl.Callback):
    """Save and leave when the run is told to stop: ends the process between two steps, and never changes training.

    SIGTERM, SIGUSR1, Ctrl-C and the time limit have one effect: the running optimizer step is finished, with all of its
    micro-batches, its logging, the validation that is due and the hooks of an epoch's end. Then one checkpoint is
    saved, and the process ends with exit code 143 (130 after Ctrl-C). Nothing is lost, and nothing is done twice. After
    the run's last step the fit ends as usual. A second Ctrl-C stops at once.

    With several processes it is enough that one of them gets the signal: all stop after the same step, the one after
    that in which the signal came. On SLURM, SIGUSR1 and the time limit put the job back into the queue, if
    `SLURMEnvironment.auto_requeue` is on, as it is by default; SIGTERM does not, since `scancel` sends it.

    The checkpoint is that of a callback with `save_now`, such as `SafeCheckpoint`; otherwise `last.ckpt` in the folder
    of the first ModelCheckpoint, or in `default_root_dir`. While the fit runs, Lightning's own handlers are not
    installed. This callback moves to the end of the list of callbacks, so that it saves what all others have done.

    Args:
        max_minutes: time limit, from the start of the process; None for no limit but that of the SLURM job.
        slurm_margin_minutes: how long before the end of its SLURM job a run leaves: long enough for a step, a
            validation and a save. A short job is left a tenth of its time before its end.
        exit_code: of the process, for schedulers that take any other code than 0 for a failure; None for 143 and 130,
            which shells give a process that a signal has ended.

    Raises:
        UsageError: a number is out of its range.
    """

    def __init__(
        self, max_minutes: float | None = None, slurm_margin_minutes: float = 5.0, exit_code: int | None = None
    ) -> None:
        if max_minutes is not None and not max_minutes > 0:
            raise UsageError(f"Preemption.max_minutes={max_minutes}: give more than 0, or leave it out")
        if not slurm_margin_minutes >= 0:
            raise UsageError(f"Preemption.slurm_margin_minutes={slurm_margin_minutes}: give 0 or more")
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise UsageError(f"Preemption.exit_code={exit_code}: give a number from 0 to 255, or leave it out")
        self.max_minutes, self.slurm_margin_minutes, self.exit_code = max_minutes, slurm_margin_minutes, exit_code
        self.deadline = math.inf  # on the clock of time.monotonic
        self._replacements = ExitStack()
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one fit."""
        self._replacements.close()
        self._signals: StopSignals | None = None
        self._ranks: Agreement | None = None
        self._reason = Reason.NONE  # on which all ranks agree
        self._checkpoint: str | None = None  # saved because of it
        self._leaving = False
        self._step = self._since = self._longest = 0  # the last step, batches since it, and the most there were

    def setup(self, trainer: Any, pl_module: Module, stage: str) -> None:
        """Take the signals over; all ranks must call."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._reset()
        if trainer.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            rank_zero_warn("Preemption stays off: the processes have no torch.distributed to agree by")
            return
        # a new list: Lightning is iterating over the old one
        trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]
        self.deadline = deadline(self.max_minutes, self.slurm_margin_minutes)
        self._ranks = Agreement(trainer.world_size)
        requeue = _requeue_signal(trainer)
        reasons = {requeue: Reason.REQUEUE, signal.SIGTERM: Reason.SIGTERM, signal.SIGINT: Reason.CTRL_C}
        self._signals = StopSignals(reasons)
        self._signals.install()
        self._replacements.enter_context(shielded_workers())
        connector = signal_connector(trainer)
        self._replacements.enter_context(replaced(connector, "register_signal_handlers", lambda: None))
        self._replacements.enter_context(replaced(connector, "teardown", self._with_restore(connector.teardown)))
        if (owner_and_name := sigterm_broadcast(trainer)) is not None:
            self._replacements.enter_context(replaced(*owner_and_name, lambda: None))

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Leave if a signal has come before the first step: during the setup, or in the sanity check."""
        if self._ranks is None:
            return
        self._step = trainer.global_step
        owner, name = hook_at_epoch_end(trainer)
        self._replacements.enter_context(replaced(owner, name, self._with_save(trainer, getattr(owner, name))))
        self._reason = Reason(self._ranks.now(self._asked()))
        if self._reason:
            resumed = is_restarting(trainer) or (trainer.ckpt_path and _is_untouched(trainer))
            self._checkpoint = str(trainer.ckpt_path) if resumed else self._save(trainer)  # there is nothing new yet
            self._leave(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Leave the loops' state out before the first batch: Lightning restores it to a step that is one too high."""
        if _is_untouched(trainer):
            checkpoint.pop("loops", None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ask the ranks after each optimizer step, and save if one is to stop and nothing more belongs to the step."""
        self._since += 1
        if trainer.global_step != self._step:
            self._step, self._since, self._longest = trainer.global_step, 0, max(self._since, self._longest)
        if self._ranks is None or self._is_within_step(trainer):
            return
        self._reason = Reason(self._ranks.later(self._asked()))
        if self._reason and may_save(trainer):
            self._save_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """The same after a validation, in which a signal may have come."""
        if self._ranks is None or trainer.sanity_checking or self._is_within_step(trainer):
            return
        if not self._reason:
            self._reason = Reason(self._ranks.now(self._asked()))
        if may_save(trainer):
            self._save_if_asked(trainer)

    def _is_within_step(self, trainer: Any) -> bool:
        """Whether the next micro-batch belongs to the running step.

        A module that optimizes manually tells by its steps alone: a step of it is taken to be over after as many
        batches as its longest one before had.
        """
        by_hand = not trainer.lightning_module.automatic_optimization
        return 0 < self._since < self._longest if by_hand else is_accumulating(trainer)

    def _with_save(self, trainer: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The last hook of an epoch's end, and then the save: a resume does not call the hooks before it anew."""

        def on_train_epoch_end(*args: Any) -> None:
            hook(*args)
            self._save_if_asked(trainer)

        return on_train_epoch_end

    def _save_if_asked(self, trainer: Any) -> None:
        if self._reason and self._checkpoint is None:
            self._checkpoint = self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Leave before the next step: the one before has been logged by now."""
        if self._checkpoint is not None:
            self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the signals back, unless the process is leaving."""
        if self._signals is not None and not isinstance(exception, Preempted):
            self._signals.restore()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """The end of a fit that was not stopped."""
        if stage == "fit" and self._ranks is not None:
            self._ranks.close()
            self._reset()

    def _asked(self) -> Reason:
        assert self._signals is not None
        over_time = Reason.TIME_LIMIT if time.monotonic() >= self.deadline else Reason.NONE
        return max(self._signals.received, over_time)

    def _save(self, trainer: Any) -> str:
        assert self._ranks is not None
        checkpoint = save(trainer, self._ranks.barrier)
        if _requeues(trainer) and self._reason is not Reason.CTRL_C:
            link_for_slurm(trainer, checkpoint)
        return checkpoint

    def _leave(self, trainer: Any) -> None:
        """End this process together with the other ranks'. Its launcher may send SIGTERM when the first is gone."""
        assert self._ranks is not None
        assert self._signals is not None
        assert self._checkpoint is not None
        self._leaving = True
        self._ranks.barrier()
        dismiss_process_observer()
        if children := launched_processes(trainer):
            atexit.register(end_children, children, _CHILDREN_SECONDS)
        self._signals.ignore_at_exit()
        if trainer.is_global_zero:
            self._print_end(trainer)
        code = 130 if self._reason is Reason.CTRL_C else 143
        stop = Preempted(code if self.exit_code is None else self.exit_code, trainer.global_step, self._checkpoint)
        weakref.finalize(stop, self._signals.restore).atexit = False  # until a program drops it, no signal is obeyed
        try:
            raise stop
        finally:
            del stop  # or the exception would hold itself

    def _print_end(self, trainer: Any) -> None:
        why = {
            Reason.TIME_LIMIT: "at the time limit",
            Reason.REQUEUE: f"by {signal.Signals(_requeue_signal(trainer)).name}",
            Reason.SIGTERM: "by SIGTERM",
            Reason.CTRL_C: "by Ctrl-C",
        }[self._reason]
        where = _where(trainer.global_step, str(self._checkpoint))
        say("", f"Stopped {why} after step {trainer.global_step}{where}", file=sys.stderr)
        job = job_id(os.environ)
        if self._reason in (Reason.REQUEUE, Reason.TIME_LIMIT) and _requeues(trainer) and job is not None:
            print(requeue(job), file=sys.stderr, flush=True)

    def _with_restore(self, lightning_teardown: Any) -> Any:
        """The teardown of Lightning's signal connector, its last call after a fit or an exception, and then ours."""

        def teardown() -> None:
            lightning_teardown()
            if self._signals is not None and not self._leaving:
                self._signals.restore()
                self._signals.restore_ctrl_c()
            self._replacements.close()

        return teardown


def _where(step: int, checkpoint: str) -> str:
    """How the line on a step goes on: the checkpoint's path, and its own step where it is an earlier one."""
    record = record_or_none(Path(checkpoint)) if checkpoint else None
    if checkpoint and (record is None or record.step == step):
        return f": {checkpoint}"
    found = f": {checkpoint} is of step {record.step}" if record else ", nor of any other"
    return f", of which no checkpoint to go on from was saved{found}"


def _is_untouched(trainer: Any) -> bool:
    """Whether the run has not seen a batch yet, in this process or before."""
    return batch_progress(trainer).total.ready == 0


def _requeues(trainer: Any) -> bool:
    """Whether SLURM runs the job again when it is asked to."""
    return bool(getattr(slurm_environment(trainer), "auto_requeue", False))


def _requeue_signal(trainer: Any) -> int:
    """The signal by which SLURM says that a job's time is nearly over: the user names it, with `sbatch --signal`."""
    return int(getattr(slurm_environment(trainer), "requeue_signal", None) or signal.SIGUSR1)


# ---- the ranks agree to stop


class Agreement:
    """Finds the largest number that any rank has given, over a gloo group of its own; every rank must make each call.

    Each call of `later` starts an `all_reduce` on the host, in the background, and reads the result of the one before,
    which has had a whole step to finish. So no step waits for another rank, and no device for the host.

    Args:
        world_size: number of ranks; 1 needs no group, and `later` gives its own number at once.
    """

    def __init__(self, world_size: int) -> None:
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def later(self, number: int) -> int:
        """The largest of the numbers that the ranks gave to the call before this one; 0 at the first call."""
        if self._group is None:
            return number
        agreed = self._finish()
        self._start(number)
        return agreed

    def now(self, number: int) -> int:
        """The largest of the numbers that the ranks give to this call and gave to the one before; waits for all."""
        if self._group is None:
            return number
        self._start(max(number, self._finish()))
        return self._finish()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.now(0)

    def close(self) -> None:
        """Give the group back, when all ranks are at the end of a fit and none of them has failed."""
        self._finish()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = self._pending = None

    def _start(self, number: int) -> None:
        tensor = torch.tensor([number], dtype=torch.int32, device="cpu")
        self._pending = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True), tensor

    def _finish(self) -> int:
        if self._pending is None:
            return 0
        (work, tensor), self._pending = self._pending, None
        work.wait()
        return int(tensor)


# ---- the checkpoint to go on from


def save(trainer: Any, barrier: Callable[[], None]) -> str:
    """Save the run as it is now, and return the path of the checkpoint to go on from when all of it is on the disk.

    A callback with a method `save_now(trainer)` does it in its own way; the checkpoint is an older one if that cannot
    save, as on a full disk, and the path empty if there is none. Otherwise `last.ckpt` is written: into the
    folder of the first ModelCheckpoint, or into `default_root_dir` where there is none. It replaces an older one when
    all of it is written. Every rank must call, between two optimizer steps; `barrier` waits for all of them.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, SavesNow):
            path = callback.save_now(trainer)
            wait_for_write(trainer)
            path = path or getattr(callback, "last_model_path", None) or trainer.ckpt_path or ""
            return str(trainer.strategy.broadcast(str(path)))
    saver = next((one for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)), None)
    folder = str(saver.dirpath if saver is not None else trainer.default_root_dir)
    path = os.path.join(folder, LAST)
    if saver is not None:
        saver.last_model_path = path  # a part of its state: the next run's replaces this file, and writes no last-v1
    if "://" in folder:
        trainer.save_checkpoint(path)  # there is no rename there
        wait_for_write(trainer)
    else:
        _save_and_rename(trainer, Path(path), barrier)
    return path


def _save_and_rename(trainer: Any, path: Path, barrier: Callable[[], None]) -> None:
    staging = str(clear_staging(path)) if trainer.is_global_zero else ""
    staging = trainer.strategy.broadcast(staging)  # also: nobody writes before it is cleared
    trainer.save_checkpoint(staging)
    wait_for_write(trainer)
    barrier()
    if trainer.is_global_zero:
        put_in_place(path)
    barrier()


def link_for_slurm(trainer: Any, checkpoint: str) -> None:
    """Name the checkpoint `hpc_ckpt_N.ckpt` as well: from there Lightning goes on when SLURM runs the job again.

    Only where this run was not started from a checkpoint of the program's own choice: that one would choose again.
    """
    chosen = trainer.ckpt_path is not None and not os.path.basename(str(trainer.ckpt_path)).startswith("hpc_ckpt_")
    if chosen or not checkpoint or "://" in checkpoint or not trainer.is_global_zero:
        return
    link = slurm_checkpoint(trainer)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(checkpoint, link.parent))
