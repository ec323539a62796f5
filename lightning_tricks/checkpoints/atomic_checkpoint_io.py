"""Save a checkpoint so that a kill, a full disk or a power cut leaves the older one; check it before it is opened."""

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl, rank_zero_warn
from lightning_tricks.checkpoints.background_writer import BackgroundWriter
from lightning_tricks.checkpoints.check_checkpoint import check_checkpoint
from lightning_tricks.checkpoints.read_file import check_content, load_file, refused_object
from lightning_tricks.checkpoints.read_folder import read_folder
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.checkpoints.snapshot import PinnedBuffers, snapshot
from lightning_tricks.checkpoints.swap_in import write_file
from lightning_tricks.checkpoints.unsafe_content import unsafe_content
from lightning_tricks.checkpoints.verify_checkpoint import check_bytes


class AtomicCheckpointIO(pl.plugins.TorchCheckpointIO):
    """Lightning's TorchCheckpointIO with saves that survive a kill and with checked loads; reads folders of shards too.

    Save: the checkpoint is streamed to a temporary file beside its path, with a checksum of all bytes, and renamed when
    the disk has it, so the older file of that name is there until then. Other programs open it as a file of Lightning.

    Load: every byte of a file is compared with what was written before anything is unpickled, and only tensors and
    plain types are let in, unless `weights_only=False` is given. A folder of shards is read as one file: weights and
    optimizer state are whole, the state is numbered, and torch and `keep_settings_on_load` check and restore both;
    each process reads all of it into the host's memory. Weights alone that `save_checkpoint` was given come back too:
    so Lightning's launchers of `ddp_spawn`, `ddp_fork` and `ddp_notebook` hand them to the process that called `fit`.

    A checkpoint with an object that a load would not let in is saved all the same; the first one causes a warning that
    names the object's key.

    Give it to a Trainer as a plugin; `python -m lightning_tricks` does so by itself. Addresses (`s3://...`) are written
    and read as Lightning does.

    Args:
        asynchronous: whether a save copies the checkpoint to the host's memory and returns, while a thread writes; the
            next save waits for it. Costs the memory of one checkpoint on the host. Off, because users of Lightning
            expect the file to be there when the save returns.

    Attributes:
        on_commit: called with the path when a checkpoint is complete under its name, in the thread that wrote it.
        on_error: called with the path and the file system's error, such as a full disk, when nothing of the new
            checkpoint is left. It returns "retry" to write again, "skip" to do without this checkpoint, or "raise" to
            raise the error, as also happens without an `on_error`.

    Raises:
        UsageError: at load: a path that is no whole checkpoint, see `verify_checkpoint`. At save: a path at which there
            is a folder that is no checkpoint.
        OSError: at save: what the file system says, see `on_error`.

    Source: https://lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html
    """

    def __init__(self, asynchronous: bool = False) -> None:
        super().__init__()
        self.asynchronous = asynchronous
        self._writer = BackgroundWriter()
        self._buffers = PinnedBuffers()
        self._has_warned = False
        self.on_commit: Callable[[Path], None] | None = None
        self.on_error: Callable[[Path, OSError], Literal["retry", "skip", "raise"]] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, which may replace a folder of shards; raise the error of an earlier save first."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: AtomicCheckpointIO takes none")
        if self.asynchronous:
            self.write_in_background(checkpoint, lambda copy: self._write(copy, path))
        else:
            self.wait()
            self._write(checkpoint, path)

    def write_in_background(self, state: Any, write: Callable[[Any], None]) -> None:
        """Wait for the running write, copy nested state to the host, and have a thread call `write` with the copy.

        For a strategy whose processes write a folder: `wait`, `raise_if_failed` and `teardown` then count this write
        too.

        Raises:
            OSError: the error of the last write in the background.
        """
        self.wait()
        copy = snapshot(state, self._buffers)
        self._writer.start(lambda: write(copy))

    def _write(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write a file, again each time `on_error` returns "retry"."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path)
            return
        path = Path(path)
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
        self._warn_of_unsafe_content(checkpoint, path)
        if self.on_commit:
            self.on_commit(path)

    def _warn_of_unsafe_content(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self._has_warned:
            return
        with suppress(OSError, RuntimeError):  # somebody has moved the file; it is saved all the same
            if found := unsafe_content(checkpoint, path):
                self._has_warned = True
                rank_zero_warn(
                    f"{path} will not open with weights_only=True, because of {', '.join(found)}: give the module's "
                    "hyper-parameters and states plain types, such as str(path), or load with weights_only=False"
                )

    def wait(self) -> None:
        """Return when every checkpoint that was given to `save_checkpoint` has its name.

        Raises:
            OSError: the error of a write in the background.
        """
        self._writer.wait()

    def raise_if_failed(self) -> None:
        """Raise the error of a write in the background that has ended, once; does not wait."""
        self._writer.raise_if_failed()

    def teardown(self) -> None:
        """Wait, at the end of the Trainer's work."""
        self.wait()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder; its tensors are on the CPU, or for a file where `map_location` puts them."""
        if "://" in str(path):
            return self._load_from_address(path, map_location, weights_only)
        file = check_checkpoint(path)
        if file.is_dir():
            return read_folder(file, weights_only)
        check_bytes(file)
        checkpoint = load_file(file, weights_only, map_location or "cpu", mmap=False)
        if read_record(file) is None or "state_dict" in checkpoint:
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
