"""Refuse options of SpikeRollback out of their range, and runs in which it could not read losses or restore a state."""

from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import is_a, unwrapped
from lightning_tricks.guards.step_guard.step_guard import StepGuard
from lightning_tricks.optim.keep_settings_on_load import layers_of

_LEAST = {"patience_steps": 1, "window_steps": 4, "snapshot_every_n_steps": 1, "keep_snapshots": 0, "max_rollbacks": 1}


def check_options(callback: Any) -> None:
    """Refuse an option out of its range."""
    if not callback.sigmas > 0:
        raise UsageError(
            f"SpikeRollback.sigmas={callback.sigmas}: give a number of standard deviations above 0, such as 6"
        )
    for name, least in _LEAST.items():
        if getattr(callback, name) < least:
            raise UsageError(f"SpikeRollback.{name}={getattr(callback, name)}: give {least} or more")


def check_run(callback: Any, trainer: Any) -> None:
    """Refuse a run that the callback could not bring back."""
    if not trainer.log_every_n_steps:
        raise UsageError(
            "trainer.log_every_n_steps=0: SpikeRollback reads the losses at log steps; set it to 50, or take it out"
        )
    if is_a(trainer.strategy, "DeepSpeedStrategy", "FSDPStrategy"):
        raise UsageError(
            f"SpikeRollback: {type(trainer.strategy).__name__} keeps weights and optimizer state where they cannot be "
            "put back: take SpikeRollback out, or shard with FSDP2Strategy"
        )
    layers = [layer for optimizer in trainer.optimizers for layer in layers_of(unwrapped(optimizer))]
    if any(isinstance(layer, torch.optim.LBFGS) for layer in layers):
        raise UsageError("SpikeRollback: LBFGS computes several losses a step; take SpikeRollback out, or use AdamW")
    if not (callback.keep_snapshots or trainer.checkpoint_callbacks or trainer.fast_dev_run):
        raise UsageError(
            "SpikeRollback.keep_snapshots=0: there are no checkpoints either to go back to; give 1 or more, or add "
            "SafeCheckpoint"
        )
    for other in trainer.callbacks:
        if isinstance(other, StepGuard) and other.max_skipped_steps < callback.patience_steps:
            raise UsageError(
                f"SpikeRollback.patience_steps={callback.patience_steps}: StepGuard stops the run after "
                f"max_skipped_steps={other.max_skipped_steps} steps in a row; give at most as many"
            )
