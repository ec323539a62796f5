"""Open a checkpoint, whatever its layout: one file, or a folder of shards as any number of processes wrote it.

`open_checkpoint` is the one entry for all that read a checkpoint; `load_weights` uses it too, and opens files of
weights alone besides. Or a checkpoint is refused in one line that says why it cannot be opened.
"""

import dataclasses
import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.foreign_files import inside
from lightning_tricks._core.tensors import blended
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE, check_bytes, check_checkpoint, no_weights
from lightning_tricks.checkpoints.folder_metadata import SafePlanner, SafeReader, read_metadata
from lightning_tricks.models import DecoderConfig

Part = Literal["weights", "optimizers", "averages"]
ALL: tuple[Part, ...] = ("weights", "optimizers", "averages")
WITHOUT_OPTIMIZERS: tuple[Part, ...] = ("weights", "averages")
WEIGHTS: tuple[Part, ...] = ("weights",)
KeyPath = tuple[str | int, ...]
# `checkpoint[AVERAGES][name]["weights"]` holds tensors by the kind of average and by the parameter's name, such as
# `["mean"]["decoder.head.weight"]`. MEAN takes the weights' place, as `checkpoint[AVERAGES][name]["blend"]` says, see
# `blended`; others are what a resume needs.
AVERAGES, MEAN, BLEND = "averages", "mean", "blend"
# Makes the tensor to read into, given its path in the checkpoint and torch's description of it: size, type, chunks.
AllocateTensor = Callable[[KeyPath, TensorStorageMetadata], Tensor | None]
# Errors of torch's unpickler, besides UnpicklingError, on bytes that torch.save did not write.
_UNREADABLE = (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ImportError)
# What torch's reader of pickles and pickle itself say of bytes that are no pickle.
_NO_PICKLE = re.compile(r"Unsupported operand \d+|invalid load key, '.*?'|pickle data was truncated")
_PLAIN = (int, float, str, bool, type(None))  # of the settings of a decoder
_LARGEST = 1 << 24  # of these, as in a config.json: above all models that there are
_OPTIMIZER = re.compile(r"optimizer_(\d+)")


def open_checkpoint(
    path: str | Path,
    *,
    parts: Collection[Part] = ALL,
    weights_only: bool | None = None,
    average: str | None = None,
    verify: bool = True,
    allocate: AllocateTensor | None = None,
    map_location: Any = "cpu",
    mmap: bool = True,
    bare: bool = False,
) -> dict[str, Any]:
    """A checkpoint as a plain Trainer's file holds it: `state_dict`, `optimizer_states` by number, the Trainer's state.

    Every byte is compared with what was written before anything is unpickled; in a run of several processes, by the
    first one of each host (LOCAL_RANK 0). A folder needs no process group, whatever number of processes wrote it;
    folders of Lightning's ModelParallelStrategy are read alike, and weights under the name that its FSDPStrategy gives
    them.

    Args:
        path: a file or a folder of shards, or an address, see `check_checkpoint`.
        parts: what to read of a folder besides the Trainer's own state; none for that state alone. A file has all.
        weights_only: for everything but tensors, as in `torch.load`: None stands for True, unless
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 is set. `.metadata` never runs anything, see `read_metadata`.
        average: name of an average of the weights to take in their place, see `with_average`; the averages and the
            optimizers' state are then left out.
        verify: False where the caller has checked the path and its bytes already, or needs neither.
        allocate: makes the tensors to read a folder into, such as DTensors of which this process reads its shards; the
            optimizers' state is then by name, as in the folder. None for a tensor that is not read. By default each
            tensor is whole.
        map_location: of a file, as in `torch.load`.
        mmap: whether a file's values are read when they are first needed; the disk space of a file that is deleted
            comes free when no tensor needs it any more.
        bare: whether a file without `state_dict` passes: weights alone that one process hands to another.

    Raises:
        UsageError: see `verify_checkpoint`; a file or a folder of another program; an object that `weights_only`
            refuses, naming its class; a file that torch cannot open; no such average.
    """
    place = local_copy(path)
    if verify:
        place = check_checkpoint(place)
        if is_first_of_host():
            check_bytes(place)
    if not parts:
        file = inside(place, place / TRAINER_STATE) if place.is_dir() else place
        state: dict[str, Any] = load_file(file, weights_only)
        check_decoder(state, None, path)
        return state
    if place.is_dir():
        if average is not None:
            parts = WITHOUT_OPTIMIZERS
        checkpoint = _read_folder(place, weights_only, parts, allocate)
    else:
        checkpoint = load_file(place, weights_only, map_location, mmap)
        if not bare or "state_dict" in checkpoint:
            check_content(checkpoint, path)
    if average is not None:
        checkpoint = with_average(checkpoint, average, path)
        checkpoint.pop("optimizer_states", None)
        checkpoint.pop(AVERAGES)
    return checkpoint


def is_first_of_host() -> bool:
    """Whether this process does for its host what is done once: what it refuses ends the run of all."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def as_file(checkpoint: dict[str, Any]) -> io.BytesIO:
    """A checkpoint as a file in memory, for Lightning's `load_from_checkpoint`."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return file


# ---- one file


def load_file(path: Path, weights_only: bool | None, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """`torch.load` of a file; see `open_checkpoint`."""
    try:
        mmap = mmap and zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise refused_object(path, error) from None
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"damaged: {path} cannot be opened ({type(error).__name__}: {reason})") from error


def check_content(checkpoint: Any, path: Any) -> None:
    """Refuse what torch can open but Lightning did not save: without weights, or the mark of Lightning's version."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise no_weights(path)
    check_decoder(checkpoint, len(checkpoint["state_dict"]), path)
    if "pytorch-lightning_version" not in checkpoint:
        raise UsageError(
            f"{path} lacks 'pytorch-lightning_version', so it is not a complete checkpoint of Lightning: give the file "
            "that a run saved, unchanged"
        )


def check_decoder(checkpoint: Any, tensors: int | None, path: Any) -> None:
    """Refuse a `decoder_config` of no decoder, or of more blocks than there are tensors, before one is built."""
    settings = checkpoint.get("decoder_config", {}) if isinstance(checkpoint, Mapping) else {}
    fields = {name: value for name, value in settings.items() if name != "class"}
    if (family := decoder_family(settings)) is None:
        return  # of a module with a decoder of its own, or of a later version: who builds it says so
    for name, value in fields.items():
        if type(value) not in _PLAIN or (type(value) is int and abs(value) > _LARGEST):
            raise UsageError(f"damaged: {path}: decoder_config: {name}={str(value)[:80]} is no setting of a decoder")
    try:
        depth = family(**fields).n_layers
        too_deep = tensors is not None and depth > tensors
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UsageError(f"damaged: {path}: decoder_config: {error}") from None
    if too_deep:
        raise UsageError(f"damaged: {path}: decoder_config: n_layers={depth}, and it holds {tensors} tensors")


def decoder_family(settings: Mapping[str, Any]) -> type[DecoderConfig] | None:
    """The class of a checkpoint's `decoder_config`; None where no class of the collection has its name and settings."""
    family = next((cls for cls in DecoderConfig.__subclasses__() if cls.__name__ == settings.get("class")), None)
    known = set() if family is None else {field.name for field in dataclasses.fields(family)}  # type: ignore[arg-type]
    return family if settings.keys() - {"class"} <= known else None


def refused_object(path: Any, error: pickle.UnpicklingError) -> UsageError:
    """Torch's refusal of an object, in one line that names the object's class and the way to let it in."""
    found = re.search(r"GLOBAL ([\w.]+)|<class '([\w.]+)'>", str(error))
    return UsageError(
        f"{path} holds {(found[1] or found[2]) if found else 'objects'}, which weights_only=True does not allow: if "
        "you trust it, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 under a strategy that "
        "ignores it"
    )


# ---- a folder of shards


def by_index(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict by name, numbered through the groups as `Optimizer.state_dict` does."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    index_of = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in state_dict["param_groups"]]
    state = {index_of[name]: value for name, value in state_dict.get("state", {}).items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _read_folder(
    folder: Path, weights_only: bool | None, parts: Collection[Part], allocate: AllocateTensor | None
) -> dict[str, Any]:
    metadata = read_metadata(folder)
    trainer_state = load_file(inside(folder, folder / TRAINER_STATE), weights_only)
    paths: dict[str, KeyPath] = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    numbers = {key: int(found[1]) for key, path in paths.items() if (found := _OPTIMIZER.fullmatch(str(path[0])))}
    flat: dict[str, Any] = {}
    for key, path in paths.items():
        if ("optimizers" in parts or key not in numbers) and ("averages" in parts or path[0] != AVERAGES):
            entry = metadata.state_dict_metadata[key]
            if not isinstance(entry, TensorStorageMetadata):
                flat[key] = None  # an object replaces it when it is read
            elif (tensor := (allocate or _allocate_whole)(path, entry)) is not None:
                flat[key] = tensor
    read_entries(folder, metadata, flat, weights_only)
    tree = unflatten_state_dict(flat, paths)
    weights = tree.pop("state_dict", None) or tree.pop("model", None)
    if weights is None:
        raise UsageError(f"{folder} holds no state_dict: it is a checkpoint of another program")
    checkpoint = {**trainer_state, "state_dict": weights}
    check_decoder(checkpoint, sum(path[0] in ("state_dict", "model") for path in paths.values()), folder)
    if AVERAGES in tree:
        checkpoint[AVERAGES] = tree[AVERAGES]
    if "lr_schedulers" in trainer_state:  # otherwise only the weights were saved
        indices = sorted(set(numbers.values())) if "optimizers" in parts else []
        states = [tree[f"optimizer_{index}"] for index in indices]
        checkpoint["optimizer_states"] = states if allocate else [by_index(state) for state in states]
    return checkpoint


def _allocate_whole(path: KeyPath, entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def read_entries(folder: Path, metadata: Any, flat: dict[str, Any], weights_only: bool | None = True) -> dict[str, Any]:
    """Read some entries of a folder into `flat`, by their keys: tensors in place, objects where there is None.

    Args:
        folder: of shards.
        metadata: of `read_metadata`.
        flat: tensors of the size of their entries, and None for objects; it is returned.
        weights_only: of objects, see `open_checkpoint`.
    """
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
    return flat


def size_of_folder(folder: Path) -> int:
    """Bytes of all tensors of a folder of shards, each counted once."""
    entries = read_metadata(folder).state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)


# ---- averages of the weights


def with_average(checkpoint: Mapping[str, Any], name: str, path: Any) -> dict[str, Any]:
    """A checkpoint in whose `state_dict` an average has taken the place of the weights that were trained.

    It is blended with them as the checkpoint says. A weight that is not averaged, because it was not trained, stays as
    it is. The average has the dtype of the weight.

    Args:
        checkpoint: with all of its tensors, whole or in shards.
        name: of the average, such as `ema`.
        path: of the checkpoint, for the message.

    Raises:
        UsageError: the checkpoint has no such average.
    """
    entry = average_entry(checkpoint, name, path)
    means, blend = entry["weights"][MEAN], entry.get(BLEND, 1.0)
    state_dict = {
        key: blended(value, means[clean_name(key)], blend).to(value.dtype) if clean_name(key) in means else value
        for key, value in checkpoint["state_dict"].items()
    }
    return {**checkpoint, "state_dict": state_dict}


def average_entry(checkpoint: Mapping[str, Any], name: str, path: Any) -> Mapping[str, Any]:
    """The entry of an average in a checkpoint, see `AVERAGES`.

    Raises:
        UsageError: the checkpoint has no such average.
    """
    found = checkpoint.get(AVERAGES) or {}
    if name not in found:
        held = f"it holds {', '.join(found)}" if found else "it was saved without one"
        raise UsageError(f"average={name}: {path} holds no such average of the weights: {held}")
    entry: Mapping[str, Any] = found[name]
    return entry
