"""Tell loggers where training goes on: a logger knows no Trainer, and opens its file before the checkpoint is read."""

from typing import Any

from lightning_tricks._lightning import pl
from lightning_tricks._trainer import logging_step, trainer_of


class ResumePoint(pl.Callback):
    """Call `resume_at(step)` of each logger that has it, once, when the first batch starts. Never changes training.

    The step is the one that the first batch's metrics will carry. Lightning corrects its count of steps only after
    `on_train_start`, so the first batch is the earliest moment at which it is known. Then this callback takes itself
    out of the Trainer's list.
    """

    @classmethod
    def watch(cls, model: Any) -> None:
        """Put one in front of the callbacks of the Trainer that is about to fit `model`, if there is such a Trainer.

        In front, so that what other callbacks write at the first batch comes after it.
        """
        trainer = trainer_of(model)
        if trainer is None or trainer.state.fn != "fit":
            return
        if not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks = [cls(), *trainer.callbacks]  # a new list: Lightning may be iterating over the old one

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Tell, and leave."""
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            if hasattr(logger, "resume_at"):
                logger.resume_at(logging_step(trainer))
