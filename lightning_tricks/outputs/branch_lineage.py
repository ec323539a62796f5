"""Record from which checkpoint a decay was branched off: in its own checkpoints, and in its log."""

from typing import Any

from lightning_tricks._core.quote import markdown_text, say
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import logging_step

__all__ = ["BranchLineage"]


class BranchLineage(pl.Callback):
    """Write the origin of a branch into each checkpoint and into the loggers. Never changes training.

    The command `branch` adds it to the run, and to the `config.yaml` that the run saves, so that a resume of the branch
    has it as well. A checkpoint holds it as the state of this callback, TensorBoard as the text `branch`, and any other
    logger among its hyper-parameters.

    Args:
        trunk: path of the checkpoint that the decay branched off.
        trunk_step: optimizer steps done in that checkpoint: the first step of the decay, counted from 0.
        decay_steps: length of the decay in optimizer steps.

    Example:
        >>> lineage = BranchLineage("checkpoints/step=8000.ckpt", trunk_step=8000, decay_steps=2000)
    """

    def __init__(self, trunk: str, trunk_step: int, decay_steps: int) -> None:
        self.trunk, self.trunk_step, self.decay_steps = trunk, trunk_step, decay_steps
        self._is_logged = False

    def state_dict(self) -> dict[str, Any]:
        """The origin, in plain types."""
        return {"trunk": self.trunk, "trunk_step": self.trunk_step, "decay_steps": self.decay_steps}

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Forget an earlier fit."""
        self._is_logged = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Print and log the origin, once: only now is the step known at which the run continues."""
        if self._is_logged:
            return
        self._is_logged = True
        end = self.trunk_step + self.decay_steps
        if not trainer.is_global_zero:
            return
        say(f"Branch: a decay of {self.decay_steps:,} steps, from step {self.trunk_step} to {end}, off {self.trunk}")
        for logger in trainer.loggers:
            write_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if write_text is not None:
                rows = "\n".join(f"| {name} | {markdown_text(value)} |" for name, value in self.state_dict().items())
                write_text("branch", f"| | |\n|---|---|\n{rows}", logging_step(trainer))
            elif hasattr(logger, "log_hyperparams"):
                logger.log_hyperparams({f"branch/{name}": value for name, value in self.state_dict().items()})
