"""Write a decoder as a GGUF file, the format of llama.cpp, with the package gguf; one tensor is in memory at a time.

First the tokenizer: tokens, their types, merges, and the name that llama.cpp has for its pre-tokenizer. llama.cpp
compiles the regular expression of each pre-tokenizer in and chooses it by name. A tokenizer whose text is cut at other
places than those of a name would get other ids there, without an error: it is refused here. Then the weights.
"""

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks.commands.export.folder_files import Entry
from lightning_tricks.data import SavedTokenizer
from lightning_tricks.data.tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, not_plain, split_pattern
from lightning_tricks.models import GPT2, DecoderConfig, hf_family, hf_weights
from lightning_tricks.models.hf_adapter import HFWeight

# ---- the tokenizer

# Types of tokens, as in `TokenType` of the package gguf
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_NAMES = {  # by pattern, and by whether a word that is a token is taken whole before any merge
    (GPT2_PATTERN, False): "gpt-2",
    (LLAMA3_PATTERN, True): "llama-bpe",
    (LLAMA3_PATTERN, False): "dbrx",
    (QWEN2_PATTERN, False): "qwen2",
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """What a GGUF file says about a byte-level BPE.

    Args:
        pre: llama.cpp's name of the pre-tokenizer.
        tokens: text of each token, by id; in the byte alphabet, but for added tokens.
        types: of each token.
        merges: pairs, joined by a space, in their order.
        eot_id: the token that ends a document and begins one; None: there is none.
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    eot_id: int | None


def gguf_vocabulary(saved: SavedTokenizer, vocab_size: int) -> GGUFVocabulary:
    """The vocabulary of a tokenizer, filled up with unused tokens to the rows of the embedding.

    Args:
        saved: of the checkpoint.
        vocab_size: rows of the embedding.

    Raises:
        UsageError: llama.cpp cannot express the tokenizer; it has more tokens than the embedding has rows.
    """
    spec = json.loads(saved.tokenizer.to_str())
    pre = pre_tokenizer_name(spec, saved.name)
    texts = {number: token for token, number in saved.tokenizer.get_vocab(with_added_tokens=False).items()}
    types = dict.fromkeys(texts, NORMAL)
    for number, added in saved.tokenizer.get_added_tokens_decoder().items():
        texts[number], types[number] = added.content, CONTROL if added.special else USER_DEFINED
        if not added.special and (added.single_word or added.lstrip or added.rstrip):
            raise _refused(saved.name, f"its token {added.content!r} takes spaces or whole words alone")
    if max(texts) >= vocab_size:
        raise UsageError(
            f"export: the tokenizer {saved.name!r} has the id {max(texts)}, and decoder.vocab_size={vocab_size}: a "
            "GGUF file cannot have more tokens than the embedding has rows"
        )
    if saved.eot_id is not None and saved.eot_id not in texts:
        raise UsageError(f"export: the tokenizer {saved.name!r} has no token {saved.eot_id}, its end of text")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return GGUFVocabulary(
        pre=pre,
        tokens=[texts.get(number, f"[PAD{number}]") for number in range(vocab_size)],
        types=[types.get(number, UNUSED) for number in range(vocab_size)],
        merges=merges,
        eot_id=saved.eot_id,
    )


def pre_tokenizer_name(spec: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name for the pre-tokenizer of a byte-level BPE.

    Args:
        spec: the tokenizer's JSON.
        name: of the tokenizer, for errors.

    Raises:
        UsageError: another kind of tokenizer, or a pre-tokenizer that llama.cpp has no name for.

    Source: `llama-vocab.cpp` of llama.cpp: the names, and the patterns from which its own are adapted.
    """
    model = spec["model"]
    if reason := not_plain(model):
        raise _refused(name, reason)
    if spec.get("normalizer"):
        raise _refused(name, "it has a normalizer")
    pattern = split_pattern(spec.get("pre_tokenizer") or {})
    found = _NAMES.get((pattern or "", bool(model.get("ignore_merges"))))
    if found is None:
        raise _refused(name, "llama.cpp has no name for its pre-tokenizer")
    return found


def _refused(name: str, reason: str) -> UsageError:
    return UsageError(f"export: format=gguf: the tokenizer {name!r} cannot be one of llama.cpp ({reason}): give hf")


# ---- the weights

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
        raise UsageError(f"export: format=gguf: {PIP_EXTRA.format('gguf')}, or pip install gguf")
    return importlib.import_module("gguf")


def gguf_architecture(config: DecoderConfig) -> str:
    """The architecture of llama.cpp that computes what `Decoder(config)` computes.

    Raises:
        UsageError: none does; names the setting.
    """
    architecture = hf_family(config).model_type
    if config.n_experts is not None:
        raise UsageError(f"export: format=gguf: decoder.n_experts={config.n_experts}: experts are not written: give hf")
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
