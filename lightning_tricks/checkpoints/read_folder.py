"""Read a folder of shards, as any number of processes wrote it, into one Lightning checkpoint."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints.check_checkpoint import REST, check_checkpoint, read_metadata
from lightning_tricks.checkpoints.optimizer_names import by_place

Path_ = tuple[str | int, ...]
# Where a tensor shall be read to: given its place in the checkpoint, its size and its type.
Room = Callable[[Path_, torch.Size, torch.dtype], Tensor]
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def whole_tensor(path: Path_, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Room for all of a tensor, in the host's memory."""
    return torch.empty(size, dtype=dtype)


def read_folder(folder: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as a plain Trainer's file holds it: `state_dict`, `optimizer_states` by place, and the rest.

    Takes no process group. Folders of Lightning's ModelParallelStrategy are read alike, and weights under the name that
    its FSDPStrategy gives them.

    Args:
        folder: which `check_checkpoint` is asked about first.
        weights_only: for what is not tensors, as in `torch.load`. torch reads `.metadata` and the settings of
            optimizers as pickles in any case, so a folder is to be trusted.

    Raises:
        UsageError: what `check_checkpoint` raises; a folder of another program; an object that `weights_only` refuses.
    """
    checkpoint = read_by_name(Path(folder), weights_only, whole_tensor)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [by_place(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def read_by_name(folder: Path, weights_only: bool | None, room: Room, optimizers: bool = True) -> dict[str, Any]:
    """`read_folder`, but optimizer state is by name as in the folder, and each process reads what it has room for.

    Args:
        folder: see there.
        weights_only: see there.
        room: gives the tensor to read to.
        optimizers: whether to read their state.
    """
    metadata = read_metadata(check_checkpoint(folder))
    rest = load_file(folder / REST, weights_only)
    paths: dict[str, Path_] = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    numbers = {key: int(found[1]) for key, path in paths.items() if (found := _OPTIMIZER.fullmatch(str(path[0])))}
    flat = {
        key: _room_for(metadata.state_dict_metadata[key], path, room)
        for key, path in paths.items()
        if optimizers or key not in numbers
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # `flat` itself is filled
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        load_shards(flat, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    tree = _unflatten((paths[key], value) for key, value in flat.items())
    weights = tree.pop("state_dict", None) or tree.pop("model", None)
    if weights is None:
        raise UsageError(f"{folder} holds no state_dict: it is a checkpoint of another program")
    checkpoint = {**rest, "state_dict": weights}
    if "lr_schedulers" in rest:  # else only the weights were saved
        places = sorted(set(numbers.values())) if optimizers else []
        checkpoint["optimizer_states"] = [tree[f"optimizer_{place}"] for place in places]
    return checkpoint


def load_file(path: Path, weights_only: bool | None) -> Any:
    """`torch.load` to the CPU, each tensor when it is first looked at.

    Raises:
        UsageError: an object that `weights_only` does not let in, naming its class.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise refused_object(path, error) from None


def refused_object(path: Any, error: pickle.UnpicklingError) -> UsageError:
    """The line for a file that holds what `weights_only` does not let in."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return UsageError(
        f"{path} holds {found[1] if found else 'objects'}, which weights_only=True does not let in: if you trust "
        "it, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 where a strategy does not"
    )


def size_of_folder(folder: Path) -> int:
    """Bytes of all tensors of a folder of shards, each counted once."""
    entries = read_metadata(folder).state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)


def _room_for(entry: Any, path: Path_, room: Room) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None  # an object, which takes this place when it is read
    return room(path, entry.size, entry.properties.dtype)


class _Node(dict[str | int, Any]):
    """A dict or a list that is being put together; what was saved as one piece is never of this class."""


def _unflatten(leaves: Iterable[tuple[Path_, Any]]) -> dict[str, Any]:
    """Nested dicts and lists of `(path, value)` pairs; a number in a path is a place in a list."""
    root = _Node()
    for path, value in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = value
    return _tidy(root)


def _tidy(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_tidy(value[key]) for key in sorted(value)]
    return {key: _tidy(entry) for key, entry in value.items()}
