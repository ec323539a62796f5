"""Write a decoder as a GGUF file, the format of llama.cpp, with the package gguf; one tensor is in memory at a time."""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.export.gguf_tokenizer import GGUFVocabulary
from lightning_tricks.commands.export.weight_files import Entry
from lightning_tricks.models import GPT2, DecoderConfig, hf_family, hf_weights
from lightning_tricks.models.hf_adapter import HFWeight

FILE = "model.gguf"
HEAD = "output.weight"

# llama.cpp's architectures have the names of transformers' `model_type`; each computes one activation.
_ACTIVATIONS = {"llama": "swiglu", "qwen3": "swiglu", "arcee": "relu2", "apertus": "relu2", "gpt2": "gelu"}
_ROTATES_NEIGHBOURS = ("llama", "arcee")  # pairs (0, 1), (2, 3), ... where others pair (0, half), (1, half + 1), ...
_HEAD_IS_STORED = ("apertus",)  # also where it is tied

# Apertus has xIELU: softplus(alpha_p) x^2 + beta x for x > 0, and (expm1(min(x, eps)) - x) (beta + softplus(alpha_n))
# + beta x below. With these four it is the squared ReLU: softplus is 1, and 0 in fp32.
XIELU = {"alpha_p": math.log(math.e - 1), "alpha_n": -100.0, "beta": 0.0, "eps": -1e-6}

_FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
_TENSOR_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def gguf_package() -> Any:
    """The package, imported.

    Raises:
        UsageError: it is missing.
    """
    if find_spec("gguf") is None:
        raise UsageError("export: format=gguf: pip install 'lightning-tricks[gguf]', or pip install gguf")
    return importlib.import_module("gguf")


def gguf_architecture(config: DecoderConfig) -> str:
    """The architecture of llama.cpp that computes what `Decoder(config)` computes.

    Raises:
        UsageError: none does; names the setting.
    """
    architecture = hf_family(config).model_type
    if config.activation != (only := _ACTIVATIONS[architecture]):
        raise UsageError(
            f"export: format=gguf: decoder.activation={config.activation}: llama.cpp's {architecture} has {only} "
            "alone: give hf"
        )
    return architecture


def stays_fp32(name: str, shape: Sequence[int]) -> bool:
    """Whether llama.cpp wants a tensor of the decoder in fp32 in every file: vectors, and the table of positions."""
    return len(shape) == 1 or name == "positions.weight"


def gguf_weights(config: DecoderConfig) -> list[HFWeight]:
    """Each tensor of the file, in the order in which the model uses them; matrices are (out, in).

    Names are those that the package gguf has for transformers' modules.
    """
    gguf = gguf_package()
    architecture = gguf_architecture(config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.n_layers)
    weights = hf_weights(config)
    if config.tie_embeddings and architecture in _HEAD_IS_STORED:
        weights = [*weights, HFWeight("lm_head.weight", (config.vocab_size, config.d_model), ("embed.weight",))]
    found = []
    for weight in weights:
        module, _, kind = weight.name.rpartition(".")
        shape = weight.shape[::-1] if weight.transposed else weight.shape
        found.append(
            dataclasses.replace(weight, name=f"{names.get_name(module)}.{kind}", shape=shape, transposed=False)
        )
    return found


def with_llama_cpp_rows(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """A tensor of the decoder with the rows of queries and keys in the order of llama.cpp's rotation.

    Where llama.cpp rotates neighbours, row j of the first half of a head goes to 2j, row j of the second to 2j + 1.

    Args:
        name: the decoder's.
        tensor: queries and keys are (heads * head_dim, d_model).
        config: of the decoder.
    """
    module = name.removesuffix(".weight")
    if not module.endswith((".attn.q", ".attn.k")) or gguf_architecture(config) not in _ROTATES_NEIGHBOURS:
        return tensor
    halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))  # head, half, row
    return halves.transpose(1, 2).flatten(0, 2)


def write_gguf(
    entries: Sequence[Entry], config: DecoderConfig, vocabulary: GGUFVocabulary, name: str, file: Path
) -> None:
    """Write the file.

    Args:
        entries: see `gguf_weights`; the first is the embedding, whose dtype names that of the file.
        config: of the decoder.
        vocabulary: of its tokenizer.
        name: of the model.
        file: to write.

    Raises:
        UsageError: weights in a dtype that is not written.
    """
    if strange := {entry.dtype for entry in entries} - _TENSOR_TYPES.keys():
        kind = str(next(iter(strange))).removeprefix("torch.")
        raise UsageError(f"export: format=gguf: the checkpoint has weights in {kind}: give dtype fp32, bf16 or fp16")
    gguf = gguf_package()
    writer = gguf.GGUFWriter(file, gguf_architecture(config))
    try:
        _add_settings(writer, gguf, config, name, entries[0].dtype)
        _add_vocabulary(writer, vocabulary)
        numpy = importlib.import_module("numpy")
        for entry in entries:
            kind = gguf.GGMLQuantizationType[_TENSOR_TYPES[entry.dtype]]
            writer.add_tensor_info(entry.name, entry.shape, numpy.dtype(numpy.float32), entry.size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.data())
    finally:
        writer.close()


def _add_settings(writer: Any, gguf: Any, config: DecoderConfig, name: str, dtype: torch.dtype) -> None:
    """The keys that llama.cpp's loader reads for the architecture, and general ones."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.n_heads)
    if isinstance(config, GPT2):
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if gguf_architecture(config) == "apertus":
        for key, value in XIELU.items():
            writer.add_array(f"xielu.{key}", [value] * config.n_layers)


def _add_vocabulary(writer: Any, vocabulary: GGUFVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE, whatever the pre-tokenizer
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    # said in every file, as llama.cpp's default depends on the pre-tokenizer
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    if vocabulary.eot_id is not None:
        writer.add_bos_token_id(vocabulary.eot_id)
        writer.add_eos_token_id(vocabulary.eot_id)
        writer.add_pad_token_id(vocabulary.eot_id)
