"""An evaluation of a checkpoint is logged at the checkpoint's step."""

from typing import Any

from lightning_tricks._trainer import take_loops_step
from lightning_tricks._trainer.lightning import Module, Trainer, pl


class EvaluatedStep(pl.Callback):
    """Log what `validate`, `test` and `predict` log at the step of their checkpoint; Lightning logs it at step 0."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Take the step over."""
        take_loops_step(trainer, checkpoint)
