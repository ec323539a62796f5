"""A run that stands still says on every rank where it stands, and names the rank that the others wait for."""

import uuid

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks.guards.hang_watchdog.board import Board, own_store
from lightning_tricks.guards.hang_watchdog.even_validation import check_lengths
from lightning_tricks.guards.hang_watchdog.place import this_process
from lightning_tricks.guards.hang_watchdog.watch import Limits, Watch


class HangWatchdog(pl.Callback):
    """Report a run that stands still; with `abort`, end it. Refuses an uneven validation. Never changes training.

    When a rank stays at one place longer than its limit, every rank prints the place and the stacks of all threads:
    waiting for the training or validation loader (which one, its dataset, its workers), in the forward, in the
    backward, in the optimizer, in a checkpoint, in the validation, or between steps. One line names the rank that the
    others wait for, also one that is stopped or gone. A run that goes on later says so.

    With `abort` all processes of the run end after that with exit code 1: every rank by itself, with its data workers,
    and with the processes that Lightning's launcher has started.

    Where the forward needs all ranks (FSDP, tensor parallelism, DeepSpeed's stage 3, DDP with buffers), ranks with
    different numbers of validation batches hang. Where the loaders have lengths, they are compared before the first
    validation.

    The watch runs in `fit` and in `validate`, from the start of the fit to its end. Nothing is done in a step.

    Args:
        limit_seconds: how long one place may last: a part of a training micro-batch, a validation batch, or all that
            lies between two of them. 300 is half of the 10 minutes after which NCCL gives up, without a stack.
        first_step_seconds: the same until the first step is done, and for the first validation batch, in which a model
            is compiled.
        checkpoint_seconds: how long the save of a checkpoint may take.
        abort: end the processes of the run after the report.

    Raises:
        UsageError: a limit is not positive, `first_step_seconds` is below `limit_seconds`; in a fit or a validation:
            the ranks have different numbers of validation batches.
    """

    def __init__(
        self,
        limit_seconds: float = 300.0,
        first_step_seconds: float = 1800.0,
        checkpoint_seconds: float = 1800.0,
        abort: bool = False,
    ) -> None:
        options = {"limit_seconds": limit_seconds, "checkpoint_seconds": checkpoint_seconds}
        for name, value in options.items():
            if not value > 0:
                raise UsageError(f"HangWatchdog.{name}={value}: give more than 0 seconds")
        if not first_step_seconds >= limit_seconds:
            raise UsageError(
                f"HangWatchdog.first_step_seconds={first_step_seconds}: give at least limit_seconds={limit_seconds}"
            )
        self.limit_seconds, self.first_step_seconds = limit_seconds, first_step_seconds
        self.checkpoint_seconds, self.abort = checkpoint_seconds, abort
        self._watch: Watch | None = None
        self._lengths_agree = False

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Begin to watch; all ranks must call."""
        self._stop()
        self._lengths_agree = False
        if stage not in ("fit", "validate") or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        process = this_process(trainer.global_rank, trainer.world_size)
        token, rank_0 = trainer.strategy.broadcast((uuid.uuid4().hex, process))
        board = Board(trainer.global_rank, trainer.world_size, token, own_store())
        limits = Limits(self.limit_seconds, self.first_step_seconds, self.checkpoint_seconds)
        self._watch = Watch(trainer, process, rank_0, limits, self.abort, board)
        self._watch.start()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Know which step is the first: a resumed run counts on."""
        if self._watch is not None:
            self._watch.first_step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Compare the numbers of batches, once for each set of loaders."""
        reloaded = trainer.reload_dataloaders_every_n_epochs and not trainer.sanity_checking  # type: ignore
        if self._watch is not None and (reloaded or not self._lengths_agree):
            check_lengths(trainer)
            self._lengths_agree = True

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Count it."""
        if self._watch is not None:
            self._watch.validations += 1

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """End the watch, and tell the other ranks the reason."""
        self._stop(exception)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """End the watch."""
        self._stop()

    def _stop(self, error: BaseException | None = None) -> None:
        if self._watch is not None:
            self._watch.close(error)
        self._watch = None
