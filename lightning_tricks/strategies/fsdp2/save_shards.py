"""Save a Lightning checkpoint of a sharded module as a folder, each rank its shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from lightning_tricks.checkpoints.averages import AVERAGES
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.checksummed_file import open_checksummed
from lightning_tricks.checkpoints.record import checksum_of, save_with_record


def shards_to_save(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of a checkpoint with shards and optimizer state by name.

    Returns:
        The shards by key, in nested dicts, and everything else; on other ranks than 0 only tensors that are sharded.
    """
    shards = {"state_dict": checkpoint["state_dict"]}
    states = checkpoint.get("optimizer_states", [])
    shards |= {f"optimizer_{number}": state for number, state in enumerate(states)}
    shards |= {AVERAGES: checkpoint[AVERAGES]} if AVERAGES in checkpoint else {}
    if dist.get_rank() != 0:
        return _only_sharded(shards), {}
    return shards, {
        key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states", AVERAGES)
    }


def _only_sharded(tree: Any) -> Any:
    """The DTensors of a nested dict."""
    if not isinstance(tree, dict):
        return tree
    return {key: _only_sharded(value) for key, value in tree.items() if isinstance(value, DTensor | dict)}


def write_shards(state: tuple[dict[str, Any], dict[str, Any]], folder: Path, group: Any) -> dict[str, int]:
    """Write this rank's files; every rank must call. For a FolderWriter, which tells the ranks of each other's errors.

    Args:
        state: of `shards_to_save`.
        folder: to write to.
        group: None: shards are on their device, and the default process group communicates. A process group of gloo:
            they are on the host already, and no device is used.

    Returns:
        The CRC-32 of each file, by its name.

    Raises:
        OSError: what the file system says of this rank's files.
    """
    shards, trainer_state = state
    files = _Files()
    copied_ahead = 10_000_000 if group is None else 0  # bytes; torch's default, or no stream of a device
    writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=copied_ahead)
    writer.fs = files
    try:
        dcp.save(shards, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # raised on all ranks; the caller tells the others of this rank's failure
        failure = error.failures.get(dist.get_rank(group))
        if failure is None:
            return {}
        raise failure[0] from None
    if dist.get_rank(group) == 0:
        # with a record of its own, by which a folder is known to need `record.json` too
        save_with_record(trainer_state, folder / TRAINER_STATE)
        files.checksums[TRAINER_STATE] = checksum_of(folder / TRAINER_STATE)
    return files.checksums


class _Files(FileSystem):
    """The files that torch writes for this rank: all on the disk when they are closed, with their checksums."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open for writing."""
        with open_checksummed(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksum

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a file its name."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)
