"""Save DeepSpeed's folder so that a kill or a full disk leaves the older one; DeepSpeed's engine writes in place.

The engine is asked for its states by a checkpoint engine of DeepSpeed that writes nothing, so no rank fails, or waits
for one that did, while the engine communicates. Then all ranks write their states and agree on the outcome.
"""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_tricks._replaced import replaced
from lightning_tricks.checkpoints.checksummed_file import open_checksummed
from lightning_tricks.checkpoints.record import checksum_of
from lightning_tricks.checkpoints.swap_in import fsync_path
from lightning_tricks.strategies.deepspeed.load_deepspeed import load_deepspeed

TAG = "checkpoint"  # the subfolder that Lightning has DeepSpeed write to
_NOWHERE = "unwritten"  # the folder that the engine is given, and that nobody makes


def states_to_save(engine: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank's engine would write, by the names of its files in the folder; every rank must call.

    Args:
        engine: DeepSpeed's, which is trained.
        checkpoint: of Lightning; its weights and optimizer state are those of the engine.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    states: dict[str, Any] = {}
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}

    class Collect(TorchCheckpointEngine):
        """Keeps each state under the name of its file."""

        def save(self, state_dict: Any, path: str) -> None:
            states[str(Path(path).relative_to(_NOWHERE))] = state_dict

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            """Make no folder: `write_states` does."""

    with ExitStack() as stack:
        stack.enter_context(replaced(engine, "checkpoint_engine", Collect()))
        stack.enter_context(replaced(engine, "_copy_recovery_script", lambda save_path: None))
        engine.save_checkpoint(_NOWHERE, tag=TAG, client_state=rest, save_latest=False)
    return states


def write_states(states: Mapping[str, Any], folder: Path, group: Any) -> dict[str, int]:
    """Write this rank's files; for a FolderWriter, which tells the ranks of each other's errors.

    Args:
        states: of `states_to_save`.
        folder: to write to.
        group: the process group of the writing threads; None for the default one.

    Returns:
        The CRC-32 of each file, by its name.

    Raises:
        OSError: what the file system says of this rank's files.
    """
    checksums = {}
    for name, state in states.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with open_checksummed(folder / name) as file:
            torch.save(state, file)  # type: ignore[arg-type]
        checksums[name] = file.checksum
    if dist.get_rank(group) == 0:
        tools = Path(load_deepspeed().__file__).parent / "utils"
        shutil.copy(tools / "zero_to_fp32.py", folder)  # DeepSpeed's program that makes one file of the folder
        (folder / "latest").write_text(TAG)  # in which DeepSpeed looks for the name of the subfolder
        for name in ("zero_to_fp32.py", "latest"):
            fsync_path(folder / name)
            checksums[name] = checksum_of(folder / name)
    return checksums
