"""The Trainer's CheckpointIO under SafeCheckpoint: atomic unless the user chose another; it reports each write."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_tricks._errors import UsageError
from lightning_tricks._trainer import has_default_checkpoint_io, is_a
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.guards.saving.checkpoint_folder import CheckpointFolder

Saver = TypeVar("Saver")


def atomic_io(trainer: Any, asynchronous: bool) -> AtomicCheckpointIO | None:
    """The Trainer's AtomicCheckpointIO, which it gets in place of Lightning's own; None where the user chose another.

    Raises:
        UsageError: that other one is Lightning's AsyncCheckpointIO.
    """
    if has_default_checkpoint_io(trainer):
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    io = trainer.strategy.checkpoint_io
    if is_a(io, "AsyncCheckpointIO"):
        raise UsageError(
            "plugins=AsyncCheckpointIO: a save returns before the checkpoint is written, and SafeCheckpoint cannot "
            "tell when it is: leave the plugin out, and give SafeCheckpoint asynchronous=True"
        )
    if not isinstance(io, AtomicCheckpointIO):
        return None
    io.asynchronous |= asynchronous
    return io


def savers_of(trainer: Any, kind: type[Saver]) -> list[Saver]:
    """The Trainer's checkpoint callbacks of one class."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, kind)]


def answer(io: AtomicCheckpointIO, folders: Sequence[CheckpointFolder]) -> None:
    """Have the CheckpointIO report each write, done or failed, to the folder in which it is."""
    io.on_commit, io.on_error = partial(_on_commit, folders), partial(_on_error, folders)


def _on_commit(folders: Sequence[CheckpointFolder], path: Path) -> None:
    for folder in folders:
        if _is_in(folder, path):
            folder.on_commit(path)


def _on_error(folders: Sequence[CheckpointFolder], path: Path, error: OSError) -> Literal["retry", "skip", "raise"]:
    for folder in folders:
        if _is_in(folder, path):
            return folder.on_error(path, error)
    return "raise"  # a checkpoint that somebody else asked for


def _is_in(folder: CheckpointFolder, path: Path) -> bool:
    return os.path.realpath(path.parent) == os.path.realpath(folder.path)
