"""Checkpoints of small decoders, made without training, and a fresh process that has transformers alone."""

from pathlib import Path
from typing import Any

import torch
from checkpoints.shards import write_shards
from harness.preloaded import python
from models.decoders import build

from lightning_tricks.checkpoints.load_weights import architecture
from lightning_tricks.data.tokenizer import tokenizer_record, train_bpe
from lightning_tricks.models import DecoderConfig

TEXT = "def parse(text):\n    return [int(word) for word in text.split(',')]\n" * 20
VOCABULARY = 280
SIZES = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}


def fresh_python() -> str:
    """A Python in which transformers is imported and the collection is not."""
    return python("tests.commands.of_transformers")


def tokenizer() -> dict[str, Any]:
    return tokenizer_record(train_bpe([TEXT], VOCABULARY), "a small text", 0)


def checkpoint(config: DecoderConfig, *, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """What a LanguageModel's checkpoint holds, as far as `export` and `average` look at it."""
    weights = {f"decoder.{name}": value for name, value in build(config, seed).state_dict().items()}
    content = {
        "state_dict": weights,
        "decoder_config": architecture(config),
        "pytorch-lightning_version": "2.6.0",
        "global_step": 3,
        "epoch": 0,
        "TextData": {"data": "text-12ab", "samples": 12, "seq_len": 32, "tokenizer": tokenizer()},
        "lightning_tricks": {"recipe": "seed_everything: 0\n"},
    }
    return {key: value for key, value in (content | changed).items() if value is not None}


def save(content: dict[str, Any], path: Path, kind: str = "file") -> Path:
    """Write a checkpoint as one file, or as a folder of shards."""
    if kind == "file":
        torch.save(content, path)
        return path
    rest = {key: value for key, value in content.items() if key not in ("state_dict", "averages")}
    shards = {key: content[key] for key in ("state_dict", "averages") if key in content}
    return write_shards(path, shards, rest)
