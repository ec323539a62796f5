"""The small files of an exported folder: settings, tokenizer and generation settings, by transformers' own classes."""

import importlib
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.models import DecoderConfig, hf_config, hf_family

_OLDEST = 5  # major version of transformers: older ones take other names of settings


def transformers_package() -> ModuleType:
    """The package, imported.

    Raises:
        UsageError: it is missing or too old.
    """
    remedy = "pip install 'lightning-tricks[hf]', or pip install 'transformers>=5' safetensors"
    if find_spec("transformers") is None or find_spec("safetensors") is None:
        raise UsageError(f"export: transformers and safetensors are needed to check what is written: {remedy}")
    if int((found := version("transformers")).partition(".")[0]) < _OLDEST:
        raise UsageError(f"export: transformers {found} is too old: {remedy}")
    return importlib.import_module("transformers")


def write_settings(config: DecoderConfig, dtype: torch.dtype, eot_id: int | None, folder: Path) -> None:
    """Write `config.json` and `generation_config.json`.

    The ids of special tokens are those of the tokenizer, or none: the defaults of a family are those of its own.
    """
    transformers, family = transformers_package(), hf_family(config)
    ids = {"bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": eot_id}
    theirs = transformers.AutoConfig.for_model(family.model_type, **hf_config(config), **ids)
    theirs.architectures, theirs.dtype = [family.class_name], str(dtype).removeprefix("torch.")
    theirs.save_pretrained(folder)
    transformers.GenerationConfig(**ids).save_pretrained(folder)


def write_tokenizer(record: dict[str, Any], saved: SavedTokenizer, max_seq_len: int, folder: Path) -> None:
    """Write `tokenizer.json`, as the checkpoint has it, and `tokenizer_config.json`.

    The token that ends a document also begins one and fills rows, as in GPT-2.
    """
    tokens: dict[str, str | None] = {}
    if saved.eot_id is not None:
        tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), saved.tokenizer.id_to_token(saved.eot_id))
        if None in tokens.values():
            raise UsageError(f"export: the tokenizer {saved.name!r} has no token {saved.eot_id}, its end of text")
    fast = transformers_package().PreTrainedTokenizerFast(
        tokenizer_object=saved.tokenizer, model_max_length=max_seq_len, clean_up_tokenization_spaces=False, **tokens
    )
    fast.save_pretrained(folder)
    # transformers 5 adds a step that does nothing, which would make it another tokenizer for an import
    (folder / "tokenizer.json").write_text(record["json"], encoding="utf-8")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # its name in transformers 4 and 5
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
