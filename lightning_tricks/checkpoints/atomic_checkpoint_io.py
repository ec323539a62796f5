"""Save a checkpoint so that a kill, a full disk or a power cut leaves the older one; check it before it is opened."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.read_file import check_content, load_file, refused_object
from lightning_tricks.checkpoints.read_folder import read_folder
from lightning_tricks.checkpoints.swap_in import write_file
from lightning_tricks.checkpoints.verify_checkpoint import check_bytes


class AtomicCheckpointIO(pl.plugins.TorchCheckpointIO):
    """Lightning's reading and writing of files, which loses nothing, and which opens a folder of shards as a file.

    Save: the checkpoint is streamed to a file beside its place, with a checksum of all bytes, and gets its name when
    the disk has it, so the older file of that name is there until then. Other programs open it as a file of Lightning.

    Load: every byte of a file is compared with what was written before anything is unpickled, and only tensors and
    plain types are let in, unless `weights_only=False` is given. A folder of shards comes with weights and optimizer
    state whole, the state numbered, so torch and `follow_recipe` check and restore them as from a file; each process
    reads all of it into the host's memory.

    Give it to a Trainer as a plugin; `python -m lightning_tricks` does so by itself. Addresses (`s3://...`) are written
    and read as Lightning does.

    Attributes:
        on_commit: called with the path when a checkpoint has its name, in the thread that wrote it.
        on_error: called with the path and the file system's error, such as a full disk, when nothing of the new
            checkpoint is left; its answer is to write again, to do without this checkpoint, or to raise the error,
            which is done where there is no `on_error`.

    Raises:
        UsageError: at load: a path that is no whole checkpoint, see `verify_checkpoint`. At save: the name of a folder
            of something else.
        OSError: at save: what the file system says, see `on_error`.

    Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_commit: Callable[[Path], None] | None = None
        self.on_error: Callable[[Path, OSError], Literal["retry", "skip", "raise"]] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, also in the place of a folder."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: AtomicCheckpointIO takes none")
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path)
        else:
            self._write(checkpoint, Path(path))

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a file, again as long as `on_error` wants it."""
        while True:
            try:
                write_file(checkpoint, path)
                break
            except OSError as error:
                answer = self.on_error(path, error) if self.on_error else "raise"
                if answer == "raise":
                    raise
                if answer == "skip":
                    return
        if self.on_commit:
            self.on_commit(path)

    def wait(self) -> None:
        """Return when every checkpoint that was given to `save_checkpoint` has its name."""

    def raise_if_failed(self) -> None:
        """Raise the error of a write in the background; does not wait for one."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder; its tensors are on the CPU, where `map_location` of a file says nothing else."""
        if "://" in str(path):
            return self._load_from_address(path, map_location, weights_only)
        file = check_checkpoint(path)
        if file.is_dir():
            return read_folder(file, weights_only)
        check_bytes(file)
        checkpoint = load_file(file, weights_only, map_location or "cpu", mmap=False)
        check_content(checkpoint, path)
        return checkpoint

    def _load_from_address(self, path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
        if weights_only is None:  # Lightning lets in every object of a checkpoint from http
            weights_only = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") not in ("1", "y", "yes", "true")
        try:
            checkpoint = super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)
        except pickle.UnpicklingError as error:
            raise refused_object(path, error) from None
        check_content(checkpoint, path)
        return checkpoint
