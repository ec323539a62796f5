"""Read a folder of shards, as any number of processes wrote it, as if it were one checkpoint file of Lightning.

`AtomicCheckpointIO` does so for Trainers that do not shard: one device, DDP.
"""

import io
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.averages import AVERAGES, with_average
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE, check_checkpoint
from lightning_tricks.checkpoints.folder_metadata import SafePlanner, SafeReader, read_metadata
from lightning_tricks.checkpoints.read_file import load_file, read_file, refused_object
from lightning_tricks.checkpoints.verify_checkpoint import verify_checkpoint

KeyPath = tuple[str | int, ...]
# Makes the tensor to read into, given its path in the checkpoint and torch's description of it: size, type, chunks.
AllocateTensor = Callable[[KeyPath, TensorStorageMetadata], Tensor]
# What torch's reader of pickles and pickle itself say of bytes that are no pickle.
_NO_PICKLE = re.compile(r"Unsupported operand \d+|invalid load key, '.*?'|pickle data was truncated")
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def read_folder(folder: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as a plain Trainer's file holds it: `state_dict`, `optimizer_states` by number, the Trainer's state.

    Needs no process group. Folders of Lightning's ModelParallelStrategy are read alike, and weights under the name that
    its FSDPStrategy gives them.

    Args:
        folder: see `verify_checkpoint`.
        weights_only: for everything but tensors, as in `torch.load`: None stands for True, unless
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 is set. `.metadata` never runs anything, see `read_metadata`.

    Raises:
        UsageError: what `verify_checkpoint` raises; a folder of another program; an object that `weights_only` refuses.
    """
    checkpoint = read_by_name(verify_checkpoint(folder), weights_only)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [by_index(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def by_index(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict by name, numbered through the groups as `Optimizer.state_dict` does."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    index_of = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in state_dict["param_groups"]]
    state = {index_of[name]: value for name, value in state_dict.get("state", {}).items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _allocate_whole(path: KeyPath, entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def read_by_name(
    folder: Path,
    weights_only: bool | None,
    allocate: AllocateTensor = _allocate_whole,
    optimizers: bool = True,
    averages: bool = True,
) -> dict[str, Any]:
    """`read_folder`, but optimizer state is by name as in the folder, and the caller makes the tensors to read into.

    Compares no checksums of shards: the caller has to, first.

    Args:
        folder: see `read_folder`.
        weights_only: see `read_folder`.
        allocate: makes a DTensor where this process shall read its shards only; by default each tensor is whole.
        optimizers: whether to read their state.
        averages: whether to read averages of the weights.
    """
    metadata = read_metadata(check_checkpoint(folder))
    trainer_state = load_file(folder / TRAINER_STATE, weights_only)
    paths: dict[str, KeyPath] = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    numbers = {key: int(found[1]) for key, path in paths.items() if (found := _OPTIMIZER.fullmatch(str(path[0])))}
    flat: dict[str, Any] = {}
    for key, path in paths.items():
        if (optimizers or key not in numbers) and (averages or path[0] != AVERAGES):
            entry = metadata.state_dict_metadata[key]
            is_tensor = isinstance(entry, TensorStorageMetadata)  # an object replaces None when it is read
            flat[key] = allocate(path, entry) if is_tensor else None
    _fill(flat, folder, metadata, weights_only)
    tree = unflatten_state_dict(flat, paths)
    weights = tree.pop("state_dict", None) or tree.pop("model", None)
    if weights is None:
        raise UsageError(f"{folder} holds no state_dict: it is a checkpoint of another program")
    checkpoint = {**trainer_state, "state_dict": weights}
    if AVERAGES in tree:
        checkpoint[AVERAGES] = tree[AVERAGES]
    if "lr_schedulers" in trainer_state:  # otherwise only the weights were saved
        indices = sorted(set(numbers.values())) if optimizers else []
        checkpoint["optimizer_states"] = [tree[f"optimizer_{index}"] for index in indices]
    return checkpoint


def _fill(flat: dict[str, Any], folder: Path, metadata: Any, weights_only: bool | None) -> None:
    """Read a flat dict's tensors in place, and its objects."""
    planner = SafePlanner(weights_only)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
            load_shards(flat, storage_reader=SafeReader(folder, metadata), planner=planner, no_dist=True)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        no_pickle = _NO_PICKLE.search(str(error))
        if isinstance(error, pickle.UnpicklingError) and not no_pickle:
            raise refused_object(folder, error) from None
        reason = no_pickle[0] if no_pickle else str(error).partition("\n")[0]
        raise UsageError(f"damaged: {folder} cannot be read ({type(error).__name__}: {reason})") from error


def read_without_optimizers(
    path: Path, weights_only: bool | None, average: str | None = None
) -> tuple[dict[str, Any], Any]:
    """A checkpoint, file or folder, and a form of it that Lightning's `load_from_checkpoint` can open.

    Args:
        path: the file or folder.
        weights_only: see `read_folder`.
        average: name of an average to take in the place of the weights, see `with_average`.

    Returns:
        The checkpoint, without optimizer state if it is a folder; and what `load_from_checkpoint` shall open: the path,
        or for a folder or an average a file in memory.

    Raises:
        UsageError: see `verify_checkpoint`, `read_file` and `with_average`.
    """
    if not check_checkpoint(path).is_dir():
        checkpoint = read_file(path, weights_only)
        if average is None:
            return checkpoint, path
    else:
        folder = verify_checkpoint(path)
        checkpoint = read_by_name(folder, weights_only, optimizers=False, averages=average is not None)
    if average is not None:
        checkpoint = with_average(checkpoint, average, path)
        checkpoint.pop("optimizer_states", None)
        checkpoint.pop(AVERAGES)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return checkpoint, file


def size_of_folder(folder: Path) -> int:
    """Bytes of all tensors of a folder of shards, each counted once."""
    entries = read_metadata(folder).state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
