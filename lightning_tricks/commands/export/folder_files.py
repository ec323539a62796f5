"""The files of an exported folder: weights, one tensor in memory at a time; settings and tokenizer by transformers."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.models import DecoderConfig, hf_config, hf_family

INDEX = "model.safetensors.index.json"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_OLDEST = 5  # major version of transformers: older ones take other names of settings


@dataclass(frozen=True)
class Entry:
    """A tensor that is written.

    Args:
        name: in the file.
        shape: of the tensor.
        dtype: of the tensor.
        build: gives the tensor; called once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def data(self) -> Any:
        """The tensor's bytes, row by row, as an array of numpy.

        Raises:
            UsageError: it is not of this shape and dtype.
        """
        tensor = self.build()
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise UsageError(
                f"export: {self.name} is {tuple(tensor.shape)} in {tensor.dtype} in the checkpoint, and its "
                f"decoder_config says {self.shape} in {self.dtype}: take another copy of the checkpoint"
            )
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


def write_weights(entries: Sequence[Entry], folder: Path, file_bytes: int) -> list[Path]:
    """Write tensors as transformers does: one file, or several of at most `file_bytes` and an index of them.

    A tensor that is larger than `file_bytes` has a file of its own. safetensors' own writer takes all tensors of a file
    at once, so the files are written here, a tensor at a time. torch's `HuggingFaceStorageWriter` writes the same
    files, of a state dict that its processes hold whole; see the page of `export` for the memory of both.

    Source: the format, https://github.com/huggingface/safetensors#format.
    """
    from huggingface_hub.serialization import split_state_dict_into_shards_factory  # comes with transformers

    by_name = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda entry: entry.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=file_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file_name, names in split.filename_to_tensors.items():
        with (folder / file_name).open("wb") as file:
            _write_file([by_name[name] for name in names], file)
    return [folder / name for name in split.filename_to_tensors]


def _write_file(entries: Sequence[Entry], file: IO[bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    begin = 0
    for entry in entries:
        offsets = [begin, begin + entry.size]
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
        begin += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        file.write(entry.data().data)


def transformers_package() -> ModuleType:
    """The package, imported.

    Raises:
        UsageError: it is missing or too old.
    """
    remedy = f"{PIP_EXTRA.format('hf')}, or pip install 'transformers>=5' safetensors"
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
