"""The weights of a checkpoint alone, whatever kind of file or folder it is: all of them, or one after the other.

And one line on where the weights or the decoder of a checkpoint differ from a module's.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.tensors import blended
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.check_checkpoint import no_weights, verify_checkpoint
from lightning_tricks.checkpoints.folder_metadata import read_metadata
from lightning_tricks.checkpoints.hf_folder import (
    is_hf_folder,
    open_safetensors,
    open_weights,
    read_config,
    read_hf_folder,
)
from lightning_tricks.checkpoints.open_checkpoint import (
    AVERAGES,
    BLEND,
    MEAN,
    WEIGHTS,
    WITHOUT_OPTIMIZERS,
    KeyPath,
    average_entry,
    check_content,
    check_decoder,
    decoder_family,
    load_file,
    open_checkpoint,
    read_entries,
    with_average,
)
from lightning_tricks.models import DecoderConfig, Llama

_SAFETENSORS = ".safetensors"
_LOADED_AVERAGE = "average"  # key that names the average which has taken the place of the weights


def load_weights(module: nn.Module, path: str | Path, average: str | None = None) -> str:
    """Load weights into a module that is not sharded, by name; every byte is checked first where there are checksums.

    Names may have the prefixes of `torch.compile` and of other wrappers or not.

    Args:
        module: any; a LightningModule with `strict_loading = False` takes the names that both have.
        path: a checkpoint of Lightning or of this collection, whole or of weights alone; a folder of shards, written by
            any number of processes; a file of `torch.save(module.state_dict())`; a file `.safetensors`; a folder of
            Hugging Face, whose names become those of the module's Decoder.
        average: name of an average that the checkpoint holds beside its weights, to load in their place, such as `ema`.

    Returns:
        One line that tells what was loaded and what was left out.

    Raises:
        UsageError: nothing there; a damaged file; DeepSpeed's folder; the first weight that
            only one of the two has, or that has another shape; no such average.
    """
    checkpoint = read_weights(path, average=average, module=module)
    weights = matched(module, checkpoint["state_dict"], path)
    module.load_state_dict(weights, strict=False)  # the names have been compared
    return summary(module, checkpoint, path)


def check_source(path: str | Path) -> Path:
    """Refuse a path from which no weights can be read, see `load_weights`; reads a file to its end, opens no tensor."""
    place = local_copy(path)
    if is_hf_folder(place):
        read_config(place)
        open_weights(place)  # which maps the files and reads their headers
        return place
    if place.suffix != _SAFETENSORS:
        return verify_checkpoint(place)
    if not place.is_file():
        raise UsageError(f"{place}: there is no such file")
    return place


def read_weights(
    path: str | Path,
    read_shards: Callable[[Path], dict[str, Any]] | None = None,
    average: str | None = None,
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """A checkpoint with its weights as `state_dict`, without optimizer state if it is a folder; see `load_weights`.

    `read_shards` reads a folder into shards of this rank; without it, it is read whole. `module` is the one that the
    weights are for, see `read_hf_folder`.
    """
    checkpoint = _read(path, read_shards, average is not None, module)
    if average is None:
        return checkpoint
    return {**with_average(checkpoint, average, path), _LOADED_AVERAGE: average}


def _read(
    path: str | Path, read_shards: Callable[[Path], dict[str, Any]] | None, averages: bool, module: nn.Module | None
) -> dict[str, Any]:
    place = check_source(path)
    if is_hf_folder(place):
        return read_hf_folder(place, module)
    if place.suffix == _SAFETENSORS:
        return {"state_dict": open_safetensors(place)}
    if place.is_dir():
        if read_shards is not None:
            return read_shards(place)
        parts = WITHOUT_OPTIMIZERS if averages else WEIGHTS
        return open_checkpoint(place, parts=parts, weights_only=True, verify=False)
    content = load_file(place, weights_only=True)
    if isinstance(content, dict):
        for name in ("state_dict", "model"):
            if isinstance(content.get(name), dict):
                return {**content, "state_dict": content[name]}
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return {"state_dict": content}
    raise UsageError(f"{path} holds no weights: neither a checkpoint nor a state_dict")


def matched(module: nn.Module, given: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """The given weights that the module has, under its own names.

    Raises:
        UsageError: the first name that only one of the two has, unless the module's `strict_loading` is False; the
            first weight of another shape.
    """
    own = {clean_name(name): (name, value) for name, value in module.state_dict().items()}
    theirs = {clean_name(name): value for name, value in given.items()}
    if not getattr(module, "strict_loading", True):
        if not own.keys() & theirs.keys():
            raise UsageError(f"{path} has no weight of the model: its first is '{next(iter(theirs), None)}'")
        own = {name: named for name, named in own.items() if name in theirs}
        theirs = {name: value for name, value in theirs.items() if name in own}
    if wrong := differing_weights({name: value for name, (_, value) in own.items()}, theirs):
        raise UsageError(f"{path}: {wrong}")
    return {full_name: theirs[name] for name, (full_name, _) in own.items()}


def differing_weights(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first name or shape in which a module's and a checkpoint's weights differ, in words; None: there is none.

    Args:
        own: what the module's `state_dict` gives; of DeepSpeed's parameters, with `keep_vars`, the whole shape counts.
        theirs: those of the checkpoint.
    """
    remedy = "take the model that it was saved from, or set strict_loading of the module to False"
    if (name := next((name for name in own if name not in theirs), None)) is not None:
        return f"it has no '{name}', which the model has: {remedy}"
    if (name := next((name for name in theirs if name not in own), None)) is not None:
        return f"it has '{name}', which the model lacks: {remedy}"
    for name in own:
        if (here := _shape(own[name])) != (there := _shape(theirs[name])):
            return f"'{name}' is {there} in it and {here} in the model"
    return None


def _shape(value: Any) -> str:
    shape = getattr(value, "ds_shape", getattr(value, "shape", None))
    return "no tensor" if shape is None else str(tuple(shape))


_LEFT_OUT = {
    "optimizer_states": "the optimizer's state",
    "lr_schedulers": "the schedule",
    "loops": "the step and the position in the data",
}


def summary(module: nn.Module, checkpoint: Mapping[str, Any], path: Any) -> str:
    """The line that tells what `checkpoint` gave to the module, and what else it holds."""
    own = [clean_name(name) for name in module.state_dict()]
    theirs = [clean_name(name) for name in checkpoint["state_dict"]]
    line = f"{path}: {len(set(own) & set(theirs)):,} of its {len(theirs):,} weights loaded"
    average = checkpoint.get(_LOADED_AVERAGE)
    line += f", of their average {average}" if average else ""
    left = [f"the average {name}" for name in checkpoint.get(AVERAGES, {}) if name != average]
    left += [words for key, words in _LEFT_OUT.items() if checkpoint.get(key)]
    line += f"; left out: {', '.join(left)}" if left else ""
    missing = _first_and_count([name for name in own if name not in theirs])
    unknown = _first_and_count([name for name in theirs if name not in own])
    line += f"; not in it, so as initialised: {missing}" if missing else ""
    return line + (f"; not in the model: {unknown}" if unknown else "")


def _first_and_count(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else ""


# ---- one weight after the other, so that no process holds the whole model in memory


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
    place = local_copy(path)
    rest = open_checkpoint(place, parts=(), weights_only=True)
    found = _of_folder(place, rest, average) if place.is_dir() else _of_file(place, rest, average)
    check_decoder(rest, len(found.shapes), path)
    return found


def _of_file(path: Path, checkpoint: dict[str, Any], average: str | None) -> StreamedWeights:
    check_content(checkpoint, path)
    weights = {clean_name(name): value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    entry = {} if average is None else average_entry(checkpoint, average, path)
    means, blend = entry.get("weights", {}).get(MEAN, {}), entry.get(BLEND, 1.0)

    def read(name: str) -> Tensor:
        raw = weights[name]
        return blended(raw, means[name], blend).to(raw.dtype) if name in means else raw

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
    means: dict[str, str] = {}  # keys
    blend = 1.0
    if average is not None:
        average_entry({AVERAGES: {name: {} for name in averages}}, average, folder)
        of_average = (AVERAGES, average, "weights", MEAN)
        means = {str(path[4]): key for path, key in keys.items() if path[:4] == of_average and path[4] in weights}
        if key := keys.get((AVERAGES, average, BLEND)):
            blend = read_entries(folder, metadata, {key: None})[key]

    def read_one(key: str) -> Tensor:
        empty = torch.empty(entries[key].size, dtype=entries[key].properties.dtype)
        return read_entries(folder, metadata, {key: empty})[key]

    def read(name: str) -> Tensor:
        key = weights[name]
        if name not in means:
            return read_one(key)
        average = read_one(means[name])
        return (average if blend == 1 else blended(read_one(key), average, blend)).to(entries[key].properties.dtype)

    shapes = {name: (tuple(entries[key].size), entries[key].properties.dtype) for name, key in weights.items()}
    return StreamedWeights(folder, rest, shapes, read, averages)


# ---- another model, another decoder


def other_weights(message: str, path: Any = None) -> str | None:
    """Torch's error of a `load_state_dict`, which may name thousands of weights, as a line; None for another error."""
    kind, _, differences = " ".join(message.split()).partition(": ")
    if not kind.startswith("Error(s) in loading state_dict for "):
        return None
    return (
        f"ckpt_path{f'={path}' if path else ''}: the checkpoint is of another model than the recipe's "
        f"{kind.rpartition(' ')[2]}: {textwrap.shorten(differences, 300, placeholder=' ...')} "
        "Give the recipe that wrote it, or another checkpoint"
    )


def architecture(config: DecoderConfig) -> dict[str, Any]:
    """Name of the family and all settings."""
    return {"class": type(config).__name__, **dataclasses.asdict(config)}  # type: ignore[call-overload]


def check_architecture(config: DecoderConfig, checkpoint: dict[str, Any], may_differ: Collection[str]) -> None:
    """Refuse a checkpoint whose decoder has other settings than the recipe's, but for the names in `may_differ`."""
    given, saved = architecture(config), checkpoint.get("decoder_config")
    if saved is None:
        return
    here, there = _with_defaults(given), _with_defaults(saved)
    names = [name for name in {**here, **there} if name not in may_differ and here.get(name) != there.get(name)]
    # sizes that follow from others are named where these are equal
    names = [name for name in names if given.get(name) is not None or saved.get(name) is not None] or names
    names = ["class"] if "class" in names else names
    if names:
        wanted = ", ".join(f"{name}={there.get(name)!r}" for name in names)
        raise UsageError(
            f"the checkpoint's decoder has {wanted}, the recipe's {', '.join(repr(here.get(name)) for name in names)}: "
            f"give the decoder {wanted}, or --config with the config.yaml of its run, or start without the checkpoint"
        )


def _with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which a size that may be left out is the size that the decoder then has: one shape is one text."""
    if (family := decoder_family(settings)) is None:
        return settings
    config = family(**{name: value for name, value in settings.items() if name != "class"})
    sizes: dict[str, int | None] = {"n_kv_heads": config.kv_heads, "d_ff": config.ffn_width}
    if isinstance(config, Llama) and config.n_experts is not None:
        sizes |= {"d_expert": config.expert_width, "d_ff": config.ffn_width if config.dense_layers else None}
    return {**architecture(config), **settings, **sizes}


def takes_decoder(cls: type, settings: dict[str, Any]) -> bool:
    """Whether to pass the decoder to a constructor: a subclass without saved settings may build its own."""
    parameters = inspect.signature(cls).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "decoder" in parameters or (passes_on and not settings)
