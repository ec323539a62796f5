"""Checkpoints that move between layouts: folders of shards and single files."""

from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.folder_checkpoint_io import FolderCheckpointIO, read_folder, size_of_folder
from lightning_tricks.checkpoints.swap_in import fsync_path, swap_in

__all__ = ["FolderCheckpointIO", "check_checkpoint", "fsync_path", "read_folder", "size_of_folder", "swap_in"]
