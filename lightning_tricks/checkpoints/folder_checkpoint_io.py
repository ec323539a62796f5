"""Folders of shards for Trainers that do not shard: one device, DDP."""

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl_import
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.read_folder import (
    load_file,
    read_by_name,
    read_folder,
    refused_object,
    whole_tensor,
)
from lightning_tricks.checkpoints.swap_in import swap_in

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO
else:
    TorchCheckpointIO = pl_import("plugins.io").TorchCheckpointIO


class FolderCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and writing of files, which opens a folder of shards as if it were one.

    Weights and optimizer state come whole, the state by place, so torch and `follow_recipe` check and restore them as
    from a file. Give it to a Trainer as a plugin; `python -m lightning_tricks` does so by itself. What is saved is a
    file; one that has the name of a folder of shards takes its place.

    Each process reads the whole folder into the host's memory: as much as all weights and optimizer state.

    Raises:
        UsageError: at load: a path that is no whole checkpoint, see `check_checkpoint`. At save: the name of a folder
            of something else.

    Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, also in the place of a folder."""
        if Path(path).is_dir():
            with swap_in(Path(path)) as new:
                super().save_checkpoint(checkpoint, new, storage_options)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder; tensors of a folder are on the CPU."""
        if check_checkpoint(path).is_dir():
            return read_folder(path, weights_only)
        try:
            checkpoint = super().load_checkpoint(path, map_location or _stay, weights_only)
        except pickle.UnpicklingError as error:
            raise refused_object(path, error) from None
        check_content(checkpoint, path)
        return checkpoint


def read_without_optimizers(path: Path, weights_only: bool | None) -> tuple[dict[str, Any], Any]:
    """A checkpoint, file or folder, and what Lightning's `load_from_checkpoint` can open in its place.

    Args:
        path: see `check_checkpoint`.
        weights_only: as in `torch.load`.

    Returns:
        The checkpoint, without optimizer state where it is a folder, and the path or the same as one file in memory.

    Raises:
        UsageError: what `check_checkpoint` and `check_content` raise; an object that `weights_only` refuses.
    """
    if not check_checkpoint(path).is_dir():
        checkpoint = load_file(path, weights_only)
        check_content(checkpoint, path)
        return checkpoint, path
    checkpoint = read_by_name(path, weights_only, whole_tensor, optimizers=False)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return checkpoint, file


def check_content(checkpoint: Any, path: Any) -> None:
    """Refuse a file of torch that is not Lightning's.

    Raises:
        UsageError: it has no state_dict or no version.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UsageError(
            f"{path} holds no state_dict, so it is no checkpoint of Lightning: "
            "bare weights are loaded by module.load_state_dict(torch.load(...)) before training"
        )
    if "pytorch-lightning_version" not in checkpoint:
        raise UsageError(
            f"{path} lacks 'pytorch-lightning_version', so it is no whole checkpoint of Lightning: give the file "
            "that a run saved, unchanged"
        )


def _stay(storage: Any, location: str) -> Any:
    return storage
