"""Tell loggers the step at which training goes on: they open their files before the checkpoint is read."""

from typing import Any

from lightning_tricks._trainer import logging_step, trainer_of
from lightning_tricks._trainer.lightning import pl


class ResumePoint(pl.Callback):
    """Call `resume_at(step)` of each logger that has it, once, when the first batch starts. Never changes training.

    The step is that of the first batch's metrics. Lightning corrects its count of steps only after `on_train_start`, so
    it is not known before the first batch. After the call this callback removes itself from the Trainer's list.
    """

    @classmethod
    def watch(cls, model: Any) -> None:
        """Put one in front of the callbacks of the Trainer that is about to fit `model`, if there is such a Trainer.

        Being the first, it runs before other callbacks write metrics at the first batch.
        """
        trainer = trainer_of(model)
        fits = trainer is not None and trainer.state.fn == "fit"
        if fits and not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks = [cls(), *trainer.callbacks]  # a new list: Lightning may be iterating over the old one

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Tell the loggers, and remove this callback."""
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            if hasattr(logger, "resume_at"):
                logger.resume_at(logging_step(trainer))
