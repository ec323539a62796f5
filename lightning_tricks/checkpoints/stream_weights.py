"""The weights of a checkpoint one after the other, so that no process holds the whole model in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_tricks._core.find_modules import clean_name
from lightning_tricks.checkpoints.averages import AVERAGES, MEAN, average_entry
from lightning_tricks.checkpoints.check_checkpoint import no_weights
from lightning_tricks.checkpoints.folder_metadata import read_metadata
from lightning_tricks.checkpoints.open_checkpoint import (
    KeyPath,
    check_content,
    check_decoder,
    open_checkpoint,
    read_entries,
)


@dataclass(frozen=True)
class StreamedWeights:
    """The weights of a checkpoint by name, each read when it is asked for, and everything else of the checkpoint.

    Args:
        path: of the checkpoint.
        rest: the checkpoint without weights, optimizer state and averages.
        shapes: shape and dtype of each weight, by its name without the prefixes of wrappers.
        read: gives a weight, whole and on the CPU; of a file, a view of the mapped file.
        averages: names of the averages of the weights that the checkpoint holds, such as `ema`.
    """

    path: Path
    rest: Mapping[str, Any]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], Tensor]
    averages: tuple[str, ...] = ()


def stream_weights(path: str | Path, average: str | None = None) -> StreamedWeights:
    """Open a checkpoint, file or folder of shards, to read its weights one by one; every byte is checked first.

    Args:
        path: see `open_checkpoint`.
        average: name of an average of the weights to read in their place.

    Raises:
        UsageError: see `open_checkpoint`; no such average.
    """
    rest = open_checkpoint(path, parts=(), weights_only=True)
    place = Path(path)
    found = _of_folder(place, rest, average) if place.is_dir() else _of_file(place, rest, average)
    check_decoder(rest.get("decoder_config", {}), len(found.shapes), path)
    return found


def _of_file(path: Path, checkpoint: dict[str, Any], average: str | None) -> StreamedWeights:
    check_content(checkpoint, path)
    weights = {clean_name(name): value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    means = {} if average is None else average_entry(checkpoint, average, path)["weights"][MEAN]

    def read(name: str) -> Tensor:
        raw = weights[name]
        return means[name].to(raw.dtype) if name in means else raw

    heavy = {"state_dict", "optimizer_states", AVERAGES}
    rest = {key: value for key, value in checkpoint.items() if key not in heavy}
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    return StreamedWeights(path, rest, shapes, read, tuple(checkpoint.get(AVERAGES) or ()))


def _of_folder(folder: Path, rest: dict[str, Any], average: str | None) -> StreamedWeights:
    metadata = read_metadata(folder)
    keys: dict[KeyPath, str] = {tuple(path): key for key, path in (metadata.planner_data or {}).items()}
    entries = metadata.state_dict_metadata
    weights = {
        clean_name(str(path[1])): key
        for path, key in keys.items()
        if path[0] in ("state_dict", "model") and len(path) == 2 and isinstance(entries[key], TensorStorageMetadata)
    }
    if not weights:
        raise no_weights(folder)
    averages = tuple(dict.fromkeys(str(path[1]) for path in keys if path[0] == AVERAGES))
    chosen = dict(weights)  # the key of each weight or of its average
    if average is not None:
        average_entry({AVERAGES: {name: {} for name in averages}}, average, folder)
        of_average = (AVERAGES, average, "weights", MEAN)
        chosen |= {str(path[4]): key for path, key in keys.items() if path[:4] == of_average and path[4] in weights}

    def read(name: str) -> Tensor:
        key = chosen[name]
        empty = torch.empty(entries[key].size, dtype=entries[key].properties.dtype)
        return read_entries(folder, metadata, {key: empty})[key].to(entries[weights[name]].properties.dtype)

    shapes = {name: (tuple(entries[key].size), entries[key].properties.dtype) for name, key in weights.items()}
    return StreamedWeights(folder, rest, shapes, read, averages)
