"""Weights from Hugging Face checkpoints with the decoder's names and layouts, and muP folded for their programs."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks.models.attention import Attention
from lightning_tricks.models.decoder import Decoder
from lightning_tricks.models.decoder_config import DecoderConfig

# Modules of a block; {i} is its number. The norms of queries and keys are Qwen3's, which is a Llama with them.
_LLAMA = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers.{i}.input_layernorm": "blocks.{i}.attn_norm",
    "model.layers.{i}.post_attention_layernorm": "blocks.{i}.mlp_norm",
    "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attn.q",
    "model.layers.{i}.self_attn.k_proj": "blocks.{i}.attn.k",
    "model.layers.{i}.self_attn.v_proj": "blocks.{i}.attn.v",
    "model.layers.{i}.self_attn.o_proj": "blocks.{i}.attn.o",
    "model.layers.{i}.self_attn.q_norm": "blocks.{i}.attn.q_norm",
    "model.layers.{i}.self_attn.k_norm": "blocks.{i}.attn.k_norm",
    "model.layers.{i}.mlp.gate_proj": "blocks.{i}.mlp.gate",
    "model.layers.{i}.mlp.up_proj": "blocks.{i}.mlp.up",
    "model.layers.{i}.mlp.down_proj": "blocks.{i}.mlp.down",
}
_GPT2 = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    "transformer.ln_f": "norm",
    "lm_head": "head",
    "transformer.h.{i}.ln_1": "blocks.{i}.attn_norm",
    "transformer.h.{i}.ln_2": "blocks.{i}.mlp_norm",
    "transformer.h.{i}.attn.c_attn": "blocks.{i}.attn.qkv",
    "transformer.h.{i}.attn.c_proj": "blocks.{i}.attn.o",
    "transformer.h.{i}.mlp.c_fc": "blocks.{i}.mlp.up",
    "transformer.h.{i}.mlp.c_proj": "blocks.{i}.mlp.down",
}


def llama_state_from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The state dict of `Decoder(config)` from that of `LlamaForCausalLM` or `Qwen3ForCausalLM`.

    Args:
        state: names and tensors as `transformers` saves them.
        config: a `Llama` of the same shape.

    Raises:
        UsageError: a tensor without a counterpart in the decoder.
    """
    return _with_head({_rename(name, _LLAMA): tensor for name, tensor in state.items()}, config)


def gpt2_state_from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The state dict of `Decoder(config)` from that of `GPT2LMHeadModel`.

    Args:
        state: names and tensors as `transformers` saves them.
        config: a `GPT2` of the same shape.

    Raises:
        UsageError: a tensor without a counterpart in the decoder.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if re.fullmatch(r"transformer\.h\.\d+\.attn\.(masked_)?bias", name):
            continue  # causal masks that old checkpoints carry
        renamed = _rename(name, _GPT2)
        if ".attn." in renamed or ".mlp." in renamed:
            tensor = tensor.t()  # GPT-2's Conv1D keeps (in, out); a bias is unchanged
        if ".qkv." in renamed:
            result |= {renamed.replace("qkv", part): rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            result[renamed] = tensor
    return _with_head(result, config)


def _rename(name: str, table: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", name)
    pattern = module.replace(number.group(), ".{i}.", 1) if number else module
    if pattern not in table:
        raise UsageError(f"weight {name!r} has no place in the decoder: give the state dict of a model of its family")
    return f"{table[pattern].format(i=number.group(1) if number else '')}.{kind}"


def _with_head(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    if config.tie_embeddings:
        state.setdefault("head.weight", state["embed.weight"])  # safetensors keeps a tied matrix once
    return state


@torch.no_grad()
def folded_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict of `Decoder(decoder.config)`, without a base, that gives the same logits as `decoder`.

    The multiplier of the logits goes into the head, that of the attention logits into the queries, or into the norm of
    the queries if there is one. To continue training, use the unfolded weights: muP's learning rates fit only those.

    Args:
        decoder: with weights, not sharded.

    Raises:
        UsageError: the head is tied to the embedding, which the multiplier would change as well.
    """
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    if decoder.logit_multiplier != 1.0:
        if decoder.config.tie_embeddings:
            raise UsageError(
                "tie_embeddings=True: muP's multiplier of the logits cannot be folded into a head that is the "
                f"embedding too: multiply the logits by {decoder.logit_multiplier:g} in the other program, or untie"
            )
        state["head.weight"] *= decoder.logit_multiplier
    for name, module in decoder.named_modules():
        if isinstance(module, Attention) and module.scale is not None:
            target = f"{name}.q_norm." if decoder.config.qk_norm else f"{name}.q."
            for key in state:
                if key.startswith(target):
                    state[key] *= module.scale * module.head_dim**0.5
    return state
