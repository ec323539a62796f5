"""Lightning's ModelCheckpoint, held back until a step is whole and the validation that is due at it is done.

A checkpoint from within a step holds the number of its micro-batches but not their gradients, and a run that goes on
from a checkpoint of before a validation leaves that validation out. A ModelCheckpoint writes such checkpoints with
`train_time_interval`, with validation in mid-step, at the first micro-batch after a resume, and wherever both a save
and a validation are due.
"""

from contextlib import ExitStack
from typing import Any

from lightning_tricks._lightning import Module, Trainer
from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import epoch_is_over, is_a, is_accumulating, validation_follows


class WholeSteps:
    """Stands between a Trainer and the two hooks of a ModelCheckpoint in which it saves in mid-epoch."""

    def __init__(self, saver: Any, replacements: ExitStack) -> None:
        self._batch_end, self._validation_end = saver.on_train_batch_end, saver.on_validation_end
        self._epoch_end = saver.on_train_epoch_end
        self._after_validation: tuple[Any, ...] | None = None  # arguments of a batch's end
        self._after_epoch: tuple[Any, ...] | None = None
        self._late_validation = False
        for name in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            replacements.enter_context(replaced(saver, name, getattr(self, name)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, *batch: Any) -> None:
        """Save if a step is whole; first of all what a validation within the step asked for."""
        if is_accumulating(trainer):
            return
        if self._late_validation:
            self._late_validation = False
            self._validation_end(trainer, pl_module)
        if validation_follows(trainer):
            self._after_validation = batch
        elif epoch_is_over(trainer):
            self._after_epoch = batch
        else:
            self._batch_end(trainer, pl_module, *batch)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save what the batch's end and the validation ask for, unless more has to come before."""
        if not trainer.sanity_checking and is_accumulating(trainer):
            self._late_validation = True
            return
        if epoch_is_over(trainer) and not trainer.sanity_checking:
            self._after_epoch, self._after_validation, self._late_validation = self._after_validation, None, True
            return
        batch, self._after_validation = self._after_validation, None
        if batch is not None:
            self._batch_end(trainer, pl_module, *batch)
        self._validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save what the last batch's end asks for, then what its validation and the epoch's end do."""
        batch, self._after_epoch = self._after_epoch, None
        if batch is not None:
            self._batch_end(trainer, pl_module, *batch)
        if self._late_validation:
            self._late_validation = False
            self._validation_end(trainer, pl_module)
        self._epoch_end(trainer, pl_module)


def hold_back_savers(trainer: Any, replacements: ExitStack) -> None:
    """Let every ModelCheckpoint of a Trainer save whole steps only, until the replacements end."""
    for saver in trainer.checkpoint_callbacks:
        if is_a(saver, "ModelCheckpoint") and not is_a(saver, "SafeCheckpoint"):
            WholeSteps(saver, replacements)
