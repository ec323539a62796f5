"""Checkpoints that survive, and that move between layouts: folders of shards and single files."""

from lightning_tricks.checkpoints.atomic_checkpoint_io import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.load_weights import load_weights
from lightning_tricks.checkpoints.read_folder import read_folder, size_of_folder
from lightning_tricks.checkpoints.swap_in import fsync_path, swap_in
from lightning_tricks.checkpoints.verify_checkpoint import verify_checkpoint

__all__ = [
    "AtomicCheckpointIO",
    "check_checkpoint",
    "fsync_path",
    "load_weights",
    "read_folder",
    "size_of_folder",
    "swap_in",
    "verify_checkpoint",
]
