"""The checkpoints of a run in a bucket: saved to a folder of this host, and uploaded from it by a thread."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from lightning_tricks._core.errors import OneLineWarning, UsageError
from lightning_tricks.checkpoints.atomic_checkpoint_io import BackgroundWriter
from lightning_tricks.checkpoints.bucket import Bucket, Stored, mirror
from lightning_tricks.guards.checkpoint_folder import CheckpointFolder, Records, Retention, last_of, to_delete


class BucketFolder(CheckpointFolder):
    """A CheckpointFolder whose checkpoints are uploaded, each when it has its name on this host.

    Nothing in the bucket is replaced. One upload goes on at a time, and a save that ends earlier waits for it. What
    could not be uploaded is tried again after the next save. Older ones are deleted when a newer one is whole there.

    Args:
        address: of the folder in the bucket.
        retention: how many checkpoints stay, there and here; permanent ones stay there.
        run: identifier of the run.
        on_update: see CheckpointFolder.
        leads: whether this process is rank 0; the first one of another host only uploads its files of a folder.
    """

    def __init__(
        self, address: str, retention: Retention, run: str, on_update: Callable[[Records], None], leads: bool
    ) -> None:
        super().__init__(mirror(address), retention, run, on_update if leads else lambda _: None)
        self.bucket, self.leads, self.place = Bucket(address), leads, address
        self._uploads = BackgroundWriter()

    def problem(self) -> str:
        """Why nothing can be saved here or there; empty where it can."""
        try:
            self.bucket.check_rights()
        except UsageError as error:
            return str(error)
        return super().problem().replace("give another", "set XDG_CACHE_HOME to another")

    def sweep(self) -> None:
        """Clean up this host's folder, and look at the bucket."""
        super().sweep()
        self._look()

    def _look(self) -> dict[str, Stored]:
        found = self.bucket.look()
        self.taken = set(found)
        self.stored = {name: one.record for name, one in found.items() if one.record and not one.is_part}
        return found

    def start(self) -> None:
        """Delete what killed processes of this run have uploaded in part, and upload what only this host has."""
        for name, found in self.bucket.look().items():
            if found.is_part and found.record and self.of_this_run({name: found.record}):
                self.bucket.delete(name, found.files)  # of this run, by its record and its name
        self._look()
        self._uploads.start(self._upload)

    def on_commit(self, path: Path) -> None:
        """A new checkpoint has its name on this host."""
        self.wait()
        super().on_commit(path)
        self._uploads.start(partial(self._upload, path))

    def on_error(self, path: Path, error: OSError) -> Literal["retry", "skip", "raise"]:
        """A new checkpoint could not be written on this host."""
        self.wait()  # or the one that is being uploaded might make room
        return super().on_error(path, error)

    def shown(self, name: str) -> str:
        """The path of a checkpoint; the address of one that only the bucket has."""
        return f"{self.bucket.address}/{name}" if name not in self.records() else super().shown(name)

    def wait(self) -> None:
        """Return when nothing is being uploaded."""
        self._uploads.wait()

    def _upload(self, path: Path | None = None) -> None:
        """Upload a new checkpoint, and any that the bucket lacks; then delete there what need not stay."""
        try:
            if not self.leads:
                assert path is not None  # rank 0 alone starts without one
                self.bucket.put(path, leads=False)
                return
            ours = self.of_this_run(self.records())
            for name in sorted(ours.keys() - self.stored.keys(), key=lambda name: -ours[name].number):
                self.bucket.put(self.path / name)
            found = self._look()
            for name in to_delete(self.of_this_run(self.stored), self.retention, self.protected):
                self.bucket.delete(name, found.pop(name).files)  # of this run, by its record and its name
                self.stored = {other: record for other, record in self.stored.items() if other != name}
        except (UsageError, OSError) as error:
            newest = last_of(self.of_this_run(self.stored))
            warnings.warn(
                f"SafeCheckpoint: {path or self.path} is not uploaded: {error}. Training continues, the next save "
                f"tries again: {f'the newest in the bucket is {newest}' if newest else 'the bucket has none yet'}",
                OneLineWarning,
                stacklevel=1,
            )
