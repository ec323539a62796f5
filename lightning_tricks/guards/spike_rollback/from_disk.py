"""Go back to a checkpoint: find the newest good one of this run, and load its weights and its optimizer state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import unwrapped
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.find_checkpoint import Candidate, candidates, newest_whole, restore_name
from lightning_tricks.checkpoints.read_file import load_file
from lightning_tricks.checkpoints.verify_checkpoint import verify_checkpoint
from lightning_tricks.guards.averages.swap import drop_gathered
from lightning_tricks.guards.saving.finite import not_finite, numbers_of
from lightning_tricks.guards.spike_rollback.training_state import settings


def folders_of(trainer: Any) -> list[Path]:
    """The folders on a file system to which a Trainer's callbacks save."""
    given = [str(saver.dirpath) for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    return [Path(folder) for folder in dict.fromkeys(given) if "://" not in folder]


class SavedStates:
    """The checkpoints of a run that lie in the folders of its Trainer's callbacks.

    One that was there before the fit began counts only up to the step with which the fit goes on: later ones are of
    another run, or of a future that this run has left.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._goes_on_from = trainer.global_step if trainer.ckpt_path or trainer.global_step else -1
        found = [candidate for folder in folders_of(trainer) for candidate in candidates(folder)]
        self._older = {(candidate.place, candidate.written_ns) for candidate in found}
        self._not_finite: set[Path] = set()

    def restore_newest(self, is_good: Callable[[int], bool]) -> tuple[Path, dict[str, Any]] | None:
        """Load weights and optimizer state of the newest finite checkpoint; every rank must call.

        Args:
            is_good: whether the state before a step may be gone back to.

        Returns:
            Its path and its content; None where there is none.
        """
        trainer = self._trainer
        io = trainer.strategy.checkpoint_io
        if isinstance(io, AtomicCheckpointIO):
            io.wait()  # what a thread still writes
        while True:
            path = trainer.strategy.broadcast(self._find(is_good) if trainer.is_global_zero else None)
            if path is None:
                return None
            checkpoint = _load(trainer, path)
            weights = not_finite(numbers_of(trainer.lightning_module)).to(trainer.strategy.root_device)
            if float(trainer.strategy.reduce(weights, reduce_op="sum")) == 0:
                return path, checkpoint
            self._not_finite.add(path)

    def _find(self, is_good: Callable[[int], bool]) -> Path | None:
        def problem(place: Path) -> str | None:
            candidate = by_place.get(place)
            if candidate is None or candidate.path in self._not_finite:
                return "new or not finite"
            try:
                step = _step_of(candidate)
                is_older = (place, candidate.written_ns) in self._older
                if not is_good(step) or (is_older and step > self._goes_on_from):
                    return "of another time"
                verify_checkpoint(place, resumes=True)
            except (UsageError, OSError) as error:
                return str(error)
            return None

        folders = folders_of(self._trainer)
        by_place = {candidate.place: candidate for folder in folders for candidate in candidates(folder)}
        chosen = newest_whole(folders, problem).chosen
        return None if chosen is None else restore_name(chosen)


def _step_of(candidate: Candidate) -> int:
    """`trainer.global_step` at which a checkpoint was written; read from its content where it has no record."""
    if candidate.record is not None:
        return candidate.record.step
    place = candidate.place
    content = load_file(place / TRAINER_STATE if place.is_dir() else place, weights_only=None)
    return int(content["global_step"])


@torch.no_grad()
def _load(trainer: Any, path: Path) -> dict[str, Any]:
    """Load weights, optimizer state and loss scale as a resume does; the schedule and all counters stay."""
    strategy, module, plugin = trainer.strategy, trainer.lightning_module, trainer.precision_plugin
    optimizers = [unwrapped(optimizer) for optimizer in trainer.optimizers]
    kept = [settings(optimizer) for optimizer in optimizers]
    drop_gathered(module)
    checkpoint: dict[str, Any] = strategy.load_checkpoint(path)
    module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    if strategy.lightning_restore_optimizer:
        strategy.load_optimizer_state_dict(checkpoint)
    for optimizer, groups in zip(optimizers, kept, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
    plugin.on_load_checkpoint(checkpoint)
    scaler, state = getattr(plugin, "scaler", None), checkpoint.get(type(plugin).__qualname__) or {}
    if scaler is not None and "scale" in state:  # what a plugin counts, such as BF16Step's steps, goes on
        scaler.load_state_dict({**scaler.state_dict(), **{name: state[name] for name in ("scale", "_growth_tracker")}})
    return checkpoint
