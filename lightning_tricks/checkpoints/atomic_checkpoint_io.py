"""Save a checkpoint so that a kill, a full disk or a power cut leaves the older one; check it before it is opened."""

import pickle
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.address import is_address
from lightning_tricks._trainer.lightning import WarnOnce, pl
from lightning_tricks._trainer.objects import is_a
from lightning_tricks.checkpoints.bucket import local_copy, mirror, put_file
from lightning_tricks.checkpoints.check_checkpoint import identity
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.checkpoints.record import record_or_none
from lightning_tricks.checkpoints.snapshot import HostBuffers, kinds_of, snapshot
from lightning_tricks.checkpoints.write_file import remove, write_file


class BackgroundWriter:
    """Runs one call at a time in a thread of its own; the end of the interpreter waits for it.

    An error of the call is raised once, by the next method that the caller uses.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Have the thread call `write`, when the running call has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint writer")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when no call is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of the last call, if it has ended with one; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error


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
    names the object's class.

    Give it to a Trainer as a plugin; `python -m lightning_tricks` does so by itself. A file for an address (`s3://...`)
    is written on this host, then put there; what is read from an address is fetched first.

    Args:
        asynchronous: whether a save copies the checkpoint to the host's memory and returns, while a thread writes; the
            next save waits for it. Costs the memory of one checkpoint on the host, which is kept for the next save:
            fresh memory is slow. Off, because users of Lightning expect the file to be there when the save returns.

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
        self._buffers = HostBuffers()
        self._warn_once = WarnOnce()
        self._verified: list[int] = []
        self._obsolete: list[Any] = []  # paths to delete when the checkpoint that is being written has its name
        self.on_commit: Callable[[Path], None] | None = None
        self.on_error: Callable[[Path, OSError], Literal["retry", "skip", "raise"]] | None = None

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        """A copy, by pickle too, writes nothing yet and reports to nobody: what waits is this one's to write."""
        return type(self), (self.asynchronous,)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, which may replace a folder of shards; raise the error of an earlier save first."""
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options}: AtomicCheckpointIO takes none")
        if self.asynchronous:
            self.write_in_background(checkpoint, lambda copy: self._write(copy, path))
        else:
            self.wait()
            self._write(checkpoint, path)

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Have a thread get the host's memory for a copy of `tensors`, which an asynchronous save then finds ready."""
        kinds = kinds_of(tensors)
        self._writer.start(lambda: self._buffers.reserve(kinds))

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
        if is_address(path):
            place = mirror(path)
            write_file(checkpoint, place)
            put_file(place, str(path))
            remove(place)  # written above
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
        self._warn_of_unsafe_content(path)
        if self.on_commit:
            self.on_commit(path)

    def _warn_of_unsafe_content(self, path: Path) -> None:
        if self._warn_once.has_given("unsafe"):
            return
        with suppress(OSError, RuntimeError):  # somebody has moved the file; it is saved all the same
            if found := unsafe_classes(path):
                self._warn_once(
                    "unsafe",
                    f"{path} will not open with weights_only=True, because it holds {', '.join(found)}: give the "
                    "module's hyper-parameters and states plain types, such as str(path), or load with "
                    "weights_only=False",
                )

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint; where saves are asynchronous, when the newer one, which may not be there yet, is whole.

        ModelCheckpoint asks for it as soon as a save has returned.
        """
        if self.asynchronous:
            self._obsolete.append(path)
        else:
            super().remove_checkpoint(path)

    def wait(self) -> None:
        """Return when every checkpoint that was given to `save_checkpoint` has its name, and delete what it replaces.

        Raises:
            OSError: the error of a write in the background; what that checkpoint was to replace stays.
        """
        obsolete, self._obsolete = self._obsolete, []
        self._writer.wait()
        for path in obsolete:
            super().remove_checkpoint(path)

    def raise_if_failed(self) -> None:
        """Raise the error of a write in the background that has ended, once; does not wait."""
        try:
            self._writer.raise_if_failed()
        except BaseException:
            self._obsolete = []  # they are the newest
            raise

    def teardown(self) -> None:
        """Wait, at the end of the Trainer's work."""
        self.wait()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder; its tensors are on the CPU, or for a file where `map_location` puts them."""
        path = local_copy(path)
        verified, bare = self.was_verified(path), record_or_none(path) is not None
        return open_checkpoint(
            path, weights_only=weights_only, verify=not verified, map_location=map_location or "cpu", mmap=False,
            bare=bare,
        )  # fmt: skip

    def remember_verified(self, file: list[int]) -> None:
        """Take note of the `identity` of a checkpoint that this command has verified: its load need not do it again."""
        self._verified = file

    def was_verified(self, path: Any) -> bool:
        """Whether a checkpoint is the one that was verified; true once."""
        verified, self._verified = self._verified, []
        return bool(verified) and identity(path) == verified


def wait_for_write(trainer: Any) -> None:
    """Wait until a checkpoint that is written in the background has its name; raises the error of its write."""
    plugin = trainer.strategy.checkpoint_io
    if hasattr(plugin, "wait"):
        plugin.wait()
    elif is_a(plugin, "AsyncCheckpointIO"):
        plugin.teardown()  # its only method that waits; the next save starts its thread again


def unsafe_classes(file: Path) -> list[str]:
    """The classes and functions in a file that only `weights_only=False` lets in, such as `pathlib.PosixPath`.

    Reads the names in its pickle, which needs neither tensors nor the objects.

    Source: https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    try:
        return sorted(get_unsafe_globals_in_checkpoint(str(file)))
    except pickle.UnpicklingError as error:  # a number of more than 255 bytes
        return [str(error)]
