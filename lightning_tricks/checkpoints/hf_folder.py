"""Read a Hugging Face folder, `config.json` and safetensors, as a checkpoint of the decoder.

The files are mapped: a process reads from the disk the parts of tensors that it uses, so that each rank of a sharded
module reads about its own shards.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks._core.find_modules import clean_name
from lightning_tricks._core.foreign_files import inside
from lightning_tricks.models import GPT2, Decoder, DecoderConfig, from_hf
from lightning_tricks.models.hf_adapter import decoder_config, with_their_prefix

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_INDEX = "model.safetensors.index.json"
_KEY = "hugging_face"  # in a checkpoint: as the state of a data module, with the tokenizer


def is_hf_folder(path: Path) -> bool:
    """Whether transformers would take a path for a model of its own."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> DecoderConfig:
    """The decoder of a folder.

    Raises:
        UsageError: no `config.json` that can be read; a model that the decoder cannot be.
    """
    return decoder_config_of(_json(folder, CONFIG), folder)


def decoder_config_of(given: Mapping[str, Any], folder: Path) -> DecoderConfig:
    """`models.decoder_config`, with the folder in its errors."""
    try:
        return decoder_config(given)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:  # of a value of another type
        raise UsageError(
            f"{folder}: its config.json is none of transformers ({error}): take another copy of it"
        ) from None


def read_hf_folder(folder: Path, module: nn.Module | None) -> dict[str, Any]:
    """A checkpoint with the folder's weights as `state_dict`, its decoder as `decoder_config`, and its tokenizer.

    Args:
        folder: see `is_hf_folder`.
        module: that the weights are for: names are those of the Decoder in it. Without a Decoder, names are
            transformers'.

    Raises:
        UsageError: files that are missing or damaged; a model that the decoder cannot be; a head that is not what
            `tie_word_embeddings` says.
    """
    stored = open_weights(folder)
    found = None if module is None else _decoder_in(module)
    if found is None:
        return {"state_dict": stored}
    prefix, decoder = found
    config = read_config(folder)
    check_depth(config, stored, folder)
    if isinstance(config, GPT2) and isinstance(decoder.config, GPT2) and not decoder.config.bias:
        config = dataclasses.replace(config, bias=False)  # transformers keeps zeros for such a model
    try:
        stored = with_their_prefix(stored, config)
        _check_tie(stored, config)
        state = from_hf(stored, config)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    content: dict[str, Any] = {
        "state_dict": {prefix + name: tensor for name, tensor in state.items()},
        "decoder_config": {"class": type(config).__name__, **dataclasses.asdict(config)},  # type: ignore[call-overload]
    }
    if tokenizer_file(folder).is_file():
        try:
            text = tokenizer_file(folder).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder / TOKENIZER} cannot be read ({error}): take another copy of it") from None
        content[_KEY] = {"tokenizer": {"name": str(folder), "sha256": "", "eot_id": None, "json": text}}
    return content


def _decoder_in(module: nn.Module) -> tuple[str, Decoder] | None:
    """The first Decoder of a module, and the prefix of its weights' names without those of wrappers."""
    for name, part in module.named_modules():
        if isinstance(part, Decoder):
            return clean_name(f"{name}.").lstrip("."), part
    return None


def open_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, mapped.

    Raises:
        UsageError: a file is missing; see `open_safetensors`.
    """
    if (folder / _INDEX).is_file():
        names = _json(folder, _INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UsageError(f"{folder / _INDEX} has no weight_map of tensors to files: take another copy of it")
        files = sorted({folder / name for name in names.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no .safetensors: save the model again with save_pretrained of transformers")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not inside(folder, file).is_file():
            raise UsageError(f"incomplete: {folder} has no {file.name}, which its index names")
        tensors |= open_safetensors(file)
    return tensors


def open_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped.

    Raises:
        UsageError: the package is missing; the file is damaged.
    """
    if find_spec("safetensors") is None:
        raise UsageError(f"{file}: to read it, {PIP_EXTRA.format('hf')}, or pip install safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
        raise UsageError(f"damaged: {file} cannot be read ({error}): take another copy of it") from None


def check_depth(config: DecoderConfig, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse more blocks than there are tensors, before a decoder of that depth is built."""
    if config.n_layers > len(stored):
        raise UsageError(
            f"{folder}: num_hidden_layers={config.n_layers} in config.json, and its files hold {len(stored)} tensors: "
            "take another copy of it"
        )


def _check_tie(stored: Mapping[str, Tensor], config: DecoderConfig) -> None:
    """Refuse a head that is stored though it is tied to another matrix, or missing though it is not tied."""
    head = stored.get("lm_head.weight")
    if not config.tie_embeddings:
        if head is None:
            raise UsageError(
                "tie_word_embeddings is false in config.json, and there is no lm_head.weight: a head would stay as it "
                "was drawn; set the flag to true if the head is the embedding"
            )
        return
    embedding = next(
        tensor for name, tensor in stored.items() if name.endswith((".embed_tokens.weight", ".wte.weight"))
    )
    if head is not None and not torch.equal(head, embedding):
        raise UsageError(
            "tie_word_embeddings is true in config.json, and lm_head.weight is another matrix than the embedding: set "
            "the flag to false"
        )


def tokenizer_file(folder: Path) -> Path:
    """The path of a folder's tokenizer, there or not; refused where it is a link out of the folder."""
    return inside(folder, folder / TOKENIZER)


def _json(folder: Path, name: str) -> dict[str, Any]:
    file = inside(folder, folder / name)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    raise UsageError(f"{file} cannot be read as JSON: take another copy of it")
