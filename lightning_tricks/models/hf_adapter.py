"""The decoder's weights and settings with Hugging Face's names, both ways, and muP folded for other programs.

Each family of models in transformers is one `HFFamily`: its names and its settings stand here once, for both ways and
for the commands `export` and `import`. Imports torch only.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks.models.decoder import Decoder
from lightning_tricks.models.decoder_config import GPT2, DecoderConfig, Llama, QKNorm

_GATED = ("gate", "up", "down")
# Modules by our names; {i} is the number of the block, {e} that of an expert, whose tensor is a part of ours. A family
# has those of them that its decoder has.
_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    **{f"blocks.{{i}}.attn.{part}": f"model.layers.{{i}}.self_attn.{part}_proj" for part in "qkvo"},
    **{f"blocks.{{i}}.attn.{part}_norm": f"model.layers.{{i}}.self_attn.{part}_norm" for part in "qk"},
    **{f"blocks.{{i}}.mlp.{part}": f"model.layers.{{i}}.mlp.{part}_proj" for part in _GATED},
}
_QWEN_MOE = {
    **_LLAMA,
    "blocks.{i}.mlp.router": "model.layers.{i}.mlp.gate",
    **{f"blocks.{{i}}.mlp.experts.{part}": f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj" for part in _GATED},
}
_DOTS1 = {
    **_QWEN_MOE,
    **{f"blocks.{{i}}.mlp.shared.{part}": f"model.layers.{{i}}.mlp.shared_experts.{part}_proj" for part in _GATED},
}
_MIXTRAL = {
    **_LLAMA,
    "blocks.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.gate",
    **{
        f"blocks.{{i}}.mlp.experts.{part}": f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}"
        for part, theirs in zip(_GATED, ("w1", "w3", "w2"), strict=True)
    },
}
_APERTUS = {
    **_LLAMA,
    "blocks.{i}.attn_norm": "model.layers.{i}.attention_layernorm",
    "blocks.{i}.mlp_norm": "model.layers.{i}.feedforward_layernorm",
}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks.{i}.attn_norm": "transformer.h.{i}.ln_1",
    "blocks.{i}.mlp_norm": "transformer.h.{i}.ln_2",
    **{f"blocks.{{i}}.attn.{part}": "transformer.h.{i}.attn.c_attn" for part in "qkv"},
    "blocks.{i}.attn.o": "transformer.h.{i}.attn.c_proj",
    "blocks.{i}.mlp.up": "transformer.h.{i}.mlp.c_fc",
    "blocks.{i}.mlp.down": "transformer.h.{i}.mlp.c_proj",
}
_LLAMA_SIZES = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings", "ffn_width": "intermediate_size",
}  # fmt: skip
_GPT2_SIZES = {"vocab_size": "vocab_size", "d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head"}
_N_EXPERTS = {
    "mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts", "dots1": "n_routed_experts",
}  # fmt: skip
_DEEPSEEK = {
    "n_shared_experts": "n_shared_experts", "router_scale": "routed_scaling_factor", "router_groups": "n_group",
    "groups_per_token": "topk_group", "dense_layers": "first_k_dense_replace",
}  # fmt: skip
_CONV1D = ("c_attn", "c_proj", "c_fc")  # GPT-2's layers whose matrix is kept as (in, out)
_EPS_1E_5 = ("arcee", "apertus", "mixtral", "olmoe")  # where config.json says none
_LARGEST = 1 << 24  # of a size in config.json: above all models that there are, and a product of two is no overflow
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


@dataclass(frozen=True)
class HFWeight:
    """One tensor of a Hugging Face checkpoint.

    Args:
        name: there.
        shape: there.
        parts: the decoder's tensors that it is made of, joined by rows; none: zeros, of biases that the decoder lacks.
        transposed: whether it is the transpose of the joined parts.
        expert: the number in the one part, a stack of experts, of the expert whose matrix it is; None: no expert's.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None

    def build(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor, from a function that gives the decoder's tensors by name."""
        if not self.parts:
            return torch.zeros(self.shape)
        tensors = [read(part) for part in self.parts]
        if self.expert is not None:
            return tensors[0][self.expert]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return joined.t() if self.transposed else joined

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The decoder's tensors of this one, as views; of a stack, the expert's matrix."""
        if not self.parts:
            return {}
        tensor = tensor.t() if self.transposed else tensor
        if len(self.parts) == 1:
            return {self.parts[0]: tensor}
        return dict(zip(self.parts, tensor.chunk(len(self.parts)), strict=True))


@dataclass(frozen=True)
class HFFamily:
    """One family of models in transformers.

    Args:
        model_type: its name in `config.json`.
        class_name: of its language model.
        names: their module by ours.
        activations: its name for each activation of `DecoderConfig` that it has; the first one is written.
        qk_norm: whether its queries and keys are normalised.
        experts: of a mixture, the settings that it has one value of; None: of a dense model.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str]
    activations: Mapping[str, tuple[str, ...]]
    qk_norm: QKNorm = False
    experts: Mapping[str, Any] | None = None


# softmax routers without what DeepSeek-V3 has
_SOFTMAX: dict[str, Any] = {
    "router": "softmax", "balance": "none", "n_shared_experts": 0, "router_scale": 1.0, "router_groups": 1,
}  # fmt: skip
_SILU = {"swiglu": ("silu",)}
_FAMILIES = {
    family.model_type: family
    for family in (
        HFFamily("llama", "LlamaForCausalLM", _LLAMA, {"swiglu": ("silu",)}),
        HFFamily("qwen3", "Qwen3ForCausalLM", _LLAMA, {"swiglu": ("silu",)}, qk_norm=True),
        HFFamily("arcee", "ArceeForCausalLM", _LLAMA, {"relu2": ("relu2",), "gelu": _GELU_TANH[::-1]}),
        HFFamily(
            "apertus", "ApertusForCausalLM", _APERTUS, {"relu2": ("relu2",), "gelu": _GELU_TANH[::-1]}, qk_norm=True
        ),
        HFFamily(
            "mixtral",
            "MixtralForCausalLM",
            _MIXTRAL,
            _SILU,
            experts=_SOFTMAX | {"normalize_router": True, "dense_layers": 0},
        ),
        HFFamily("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_MOE, _SILU, qk_norm=True, experts=_SOFTMAX),
        HFFamily(
            "olmoe", "OlmoeForCausalLM", _QWEN_MOE, _SILU, qk_norm="whole", experts=_SOFTMAX | {"dense_layers": 0}
        ),
        # the router and the experts of DeepSeek-V3 with the attention of Qwen3
        HFFamily(
            "dots1", "Dots1ForCausalLM", _DOTS1, _SILU, qk_norm=True, experts={"router": "sigmoid", "balance": "bias"}
        ),
        HFFamily("gpt2", "GPT2LMHeadModel", _GPT2, {"gelu": _GELU_TANH, "relu2": ("relu2",)}),
    )
}


def hf_family(config: DecoderConfig) -> HFFamily:
    """The family of transformers whose models compute what `Decoder(config)` computes.

    Raises:
        UsageError: no family does; names the setting.
    """
    if config.logit_softcap is not None:  # those that have it differ in norms, in the embedding or in positions
        raise UsageError(
            f"decoder.logit_softcap={config.logit_softcap}: no model of transformers has it and is a decoder like this "
            "in all else: train without it for export, import and weights of the hub"
        )
    if isinstance(config, GPT2):
        family = _FAMILIES["gpt2"]
        for option, is_there, wanted in (
            ("activation", config.activation in family.activations, " or ".join(family.activations)),
            ("n_kv_heads", config.kv_heads == config.n_heads, "as many as n_heads"),
            ("qk_norm", not config.qk_norm, "False"),
        ):
            if not is_there:
                value = getattr(config, option)
                raise UsageError(f"decoder.{option}={value}: no GPT-2 of transformers has it, it would need {wanted}")
        return family
    if not isinstance(config, Llama):
        raise UsageError(f"decoder={type(config).__name__}: Hugging Face's names are known for Llama and GPT2 alone")
    if config.n_experts is not None:
        return _family_with_experts(config)
    if config.qk_norm == "whole":
        raise UsageError("decoder.qk_norm=whole: transformers has it with experts alone: set n_experts, or false")
    return next(
        family
        for family in _FAMILIES.values()
        if family.experts is None
        and family.names is not _GPT2
        and config.activation in family.activations
        and config.qk_norm == family.qk_norm
    )


def _family_with_experts(config: Llama) -> HFFamily:
    """See `hf_family`."""
    name = {False: "mixtral", True: "qwen3_moe", "whole": "olmoe"}[config.qk_norm]
    family = _FAMILIES["dots1" if config.router == "sigmoid" else name]
    assert family.experts is not None
    for option, wanted in {**family.experts, "qk_norm": family.qk_norm}.items():
        if (value := getattr(config, option)) != wanted:
            raise UsageError(f"decoder.{option}={value}: no {family.class_name} has it, it would need {wanted}")
    if family.names is _DOTS1 and not config.n_shared_experts:
        raise UsageError(f"decoder.n_shared_experts=0: no {family.class_name} has it, it would need at least 1")
    return family


# ---- weights


def hf_weights(config: DecoderConfig) -> list[HFWeight]:
    """Each tensor of the Hugging Face model, in the order in which the model uses them.

    A tied head is not among them: transformers makes it of the embedding, as `tie_word_embeddings` says.
    """
    names = hf_family(config).names
    # GPT-2 of transformers always has biases: for a decoder without them, they are zeros
    shaped = dataclasses.replace(config, bias=True) if isinstance(config, GPT2) else config
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(shaped).state_dict().items()}
    found: dict[str, HFWeight] = {}
    for name, shape in shapes.items():
        if name == "head.weight" and config.tie_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        block = name.split(".")[1] if name.startswith("blocks.") else ""
        if module.endswith(".experts"):
            of_experts = names[name.replace(f".{block}.", ".{i}.", 1)]
            for expert in range(shape[0]):
                stored = f"{of_experts.format(i=block, e=expert)}.weight"
                found[stored] = HFWeight(stored, shape[1:], (name,), expert=expert)
            continue
        theirs = names[module.replace(f".{block}.", ".{i}.", 1) if block else module].format(i=block)
        transposed = theirs.endswith(_CONV1D) and kind == "weight"
        if module.endswith(".router") and kind == "bias":
            kind = "e_score_correction_bias"
        parts = () if kind == "bias" and not config.bias else (name,)
        before = found.get(f"{theirs}.{kind}")
        if before is not None:  # a part of a fused layer: its rows follow those before it
            parts = (*before.parts, *parts)
            rows = before.shape[-1] if transposed else before.shape[0]
            shape = (rows + shape[0], *shape[1:])
        found[f"{theirs}.{kind}"] = HFWeight(
            f"{theirs}.{kind}", shape[::-1] if transposed else shape, parts, transposed
        )
    return list(found.values())


def to_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The state dict of the Hugging Face model, from that of `Decoder(config)`; tensors are views where they can be.

    Raises:
        UsageError: see `hf_family`.
    """
    return {weight.name: weight.build(state.__getitem__) for weight in hf_weights(config)}


def from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The state dict of `Decoder(config)`, from that of the Hugging Face model; tensors are views, but for experts.

    Args:
        state: names and tensors as transformers saves them; some may be missing, as the head of a tied model is.
        config: of a decoder of the same shape.

    Raises:
        UsageError: a tensor without a place in the decoder; a bias that the decoder lacks and that is not zero.
    """
    weights = {weight.name: weight for weight in hf_weights(config)}
    result: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}  # of experts
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_embeddings:
            result["head.weight"] = tensor
        elif name in weights and (expert := weights[name].expert) is not None:
            stacks.setdefault(weights[name].parts[0], {})[expert] = tensor
        elif name in weights:
            result |= weights[name].split(tensor)
            if not weights[name].parts and tensor.any():
                raise UsageError(f"weight {name!r} is not zero, and the decoder has bias=False: set bias: true")
        elif not _is_mask(name):
            raise UsageError(
                f"weight {name!r} has no place in the decoder: give the state dict of a model of its family"
                f"{did_you_mean(name, weights)}"
            )
    for name, stack in stacks.items():
        if len(stack) < (config.n_experts or 0):
            raise UsageError(f"{name!r} has {len(stack)} of {config.n_experts} experts: take another copy of the model")
        result[name] = torch.stack([stack[expert] for expert in range(len(stack))])
    if config.tie_embeddings and "embed.weight" in result:
        result.setdefault("head.weight", result["embed.weight"])  # safetensors keeps a tied matrix once
    return result


def _is_mask(name: str) -> bool:
    """Whether a tensor is a causal mask, which GPT-2's old checkpoints carry, or a table of rotary positions."""
    return name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"))


def with_their_prefix(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """A state dict of transformers' bare model, whose names lack `transformer.`, as of its language model.

    GPT-2's own checkpoint on the hub is one.
    """
    prefix = "transformer." if hf_family(config).names is _GPT2 else "model."
    if any(name.startswith(prefix) for name in state):
        return dict(state)
    return {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in state.items()}


# ---- settings


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The arguments of transformers' configuration class, of version 5 or later.

    Raises:
        UsageError: see `hf_family`.
    """
    family = hf_family(config)
    activation = family.activations[config.activation][0]
    sizes = _GPT2_SIZES if isinstance(config, GPT2) else _LLAMA_SIZES
    shared = {theirs: getattr(config, ours) for ours, theirs in sizes.items()}
    shared |= {"initializer_range": config.init_std, "tie_word_embeddings": config.tie_embeddings}
    if isinstance(config, GPT2):
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return shared | {
            "n_positions": config.max_seq_len,
            "n_inner": config.ffn_width,
            "activation_function": activation,
            "layer_norm_epsilon": config.norm_eps,
            **dropout,
        }
    return shared | {
        "num_key_value_heads": config.kv_heads,
        "hidden_act": activation,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **({} if family.model_type == "apertus" else {"head_dim": config.head_dim}),  # which has no such setting
        **_hf_experts(config, family.model_type),
    }


def _hf_experts(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """The settings of a mixture, in transformers' words."""
    if not isinstance(config, Llama) or config.n_experts is None:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": config.experts_per_token, _N_EXPERTS[kind]: config.n_experts}
    if kind != "mixtral":
        found["norm_topk_prob"] = config.normalize_router
    if kind in ("mixtral", "olmoe"):
        return found | {"intermediate_size": config.expert_width}
    found["moe_intermediate_size"] = config.expert_width
    if kind == "qwen3_moe":
        return found | {"mlp_only_layers": list(range(config.dense_layers)), "decoder_sparse_step": 1}
    return found | {theirs: getattr(config, ours) for ours, theirs in _DEEPSEEK.items()} | {"sliding_window": None}


def _decoder_experts(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The settings of a mixture, in the decoder's words."""
    words = _N_EXPERTS[kind], "num_local_experts", "num_experts"
    sizes = {"experts_per_token": "num_experts_per_tok", "n_experts": next((w for w in words if w in given), words[0])}
    if kind in ("qwen3_moe", "dots1"):
        sizes["d_expert"] = "moe_intermediate_size"
    found: dict[str, Any] = _sizes(given, sizes)
    found |= {"balance": "none"} if kind != "dots1" else {"balance": "bias", "router": "sigmoid"}
    found["normalize_router"] = given.get("norm_topk_prob", kind == "mixtral")
    if kind == "qwen3_moe":
        found["dense_layers"] = len(dense := sorted(given.get("mlp_only_layers") or []))
        if dense != list(range(len(dense))) or given.get("decoder_sparse_step", 1) != 1:
            raise UsageError(
                f"mlp_only_layers={dense}, decoder_sparse_step={given.get('decoder_sparse_step', 1)}: the decoder has "
                "dense blocks at its beginning alone"
            )
    if kind == "dots1":
        defaults = {"n_shared_experts": 0, "dense_layers": 0, "router_scale": 1.0}
        found |= {ours: given.get(theirs, defaults.get(ours, 1)) for ours, theirs in _DEEPSEEK.items()}
    return found


def decoder_config(given: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a Hugging Face model.

    Args:
        given: the content of its `config.json`, as transformers 4 or 5 writes it.

    Raises:
        UsageError: another kind of model; a setting that the decoder lacks, by its name there.
    """
    given = {key: value for key, value in given.items() if value is not None}  # null is the default, as in transformers
    kind = str(given.get("model_type"))
    if kind.startswith("deepseek"):
        raise UsageError(f"model_type={kind}: the decoder has its router and experts, and not its attention (MLA)")
    if kind not in _FAMILIES:
        raise UsageError(f"model_type={kind}: the decoder is one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[kind]
    if any(word != "full_attention" for word in given.get("layer_types") or ()):
        raise UsageError(f"layer_types={given['layer_types']!r}: the decoder has 'full_attention' alone")
    for key, value in _needed(family):
        if given.get(key, value) != value:
            raise UsageError(f"{key}={given[key]!r}: the decoder has {value!r} alone")
    if type(tied := given.get("tie_word_embeddings", kind == "gpt2")) is not bool:
        raise UsageError(f"tie_word_embeddings={tied!r}: give true or false")
    key = "activation_function" if kind == "gpt2" else "hidden_act"
    word = given.get(key, next(iter(family.activations.values()))[0])
    activation: Any = next((ours for ours, theirs in family.activations.items() if word in theirs), None)
    if activation is None:
        words = ", ".join(name for names in family.activations.values() for name in names)
        raise UsageError(f"{key}={word!r}: the decoder has, of a {kind}, {words}")
    init_std = float(given.get("initializer_range", 0.02))
    shared: dict[str, Any] = {"activation": activation, "init_std": init_std, "tie_embeddings": tied}
    if kind == "gpt2":
        return GPT2(
            **_sizes(given, _GPT2_SIZES),
            **shared,
            max_seq_len=given.get("n_positions", 1024),
            d_ff=given.get("n_inner") or 4 * given["n_embd"],
            norm_eps=float(given.get("layer_norm_epsilon", 1e-5)),
        )
    sizes = _sizes(given, _LLAMA_SIZES)
    sizes["d_ff"] = sizes.pop("ffn_width")
    if given.get("head_dim", width := sizes["d_model"] // sizes["n_heads"]) != width:
        raise UsageError(f"head_dim={given['head_dim']}: the decoder's is hidden_size / num_attention_heads = {width}")
    return Llama(
        **sizes,
        **shared,
        n_kv_heads=given.get("num_key_value_heads") or sizes["n_heads"],
        qk_norm=family.qk_norm,
        norm_eps=float(given.get("rms_norm_eps", 1e-5 if kind in _EPS_1E_5 else 1e-6)),
        rope_theta=_rope_theta(given, kind),
        **({} if family.experts is None else _decoder_experts(given, kind)),
    )


def _needed(family: HFFamily) -> Iterator[tuple[str, Any]]:
    """The settings that the decoder does not have, with the value at which they change nothing."""
    yield "quantization_config", None
    if family.names is _GPT2:
        yield "scale_attn_weights", True
        yield from ((key, False) for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"))
        return
    yield from ((key, False) for key in ("attention_bias", "mlp_bias", "use_sliding_window"))
    yield "partial_rotary_factor", 1.0
    yield "clip_qkv", None
    if family.names is _MIXTRAL:
        yield "sliding_window", None


def _sizes(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    for name in names.values():
        if type(given.get(name)) is not int:
            raise UsageError(f"config.json says no {name}: take another copy of it")
        if not 1 <= given[name] <= _LARGEST:
            raise UsageError(f"config.json says {name}={given[name]}: take another copy of it")
    return {ours: given[theirs] for ours, theirs in names.items()}


def _rope_theta(given: Mapping[str, Any], kind: str) -> float:
    """The base of the wavelengths, in the words of transformers 5 or 4; tables that are stretched are refused."""
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    word = rope.get("rope_type", rope.get("type", "default"))
    if word != "default" or (kind == "apertus" and not rope and "rope_theta" not in given):
        raise UsageError(f"rope_type={word if rope else 'llama3'}: the decoder's rotary positions are not stretched")
    theta = rope.get("rope_theta", given.get("rope_theta"))
    if theta is None:
        return 1e6 if kind == "mixtral" else 10000.0
    return float(theta)


# ---- muP


def fold_factors(config: DecoderConfig, base: DecoderConfig | None) -> Callable[[str], float]:
    """The number by which to multiply each of the decoder's tensors, given its name, to do without `base`.

    The multiplier of the logits goes into the head, that of the attention logits into the queries, or into the norm of
    the queries if there is one.

    Raises:
        UsageError: the head is tied to the embedding, which the multiplier would change as well.
    """
    logits, attention = 1.0, 1.0
    if base is not None:
        logits, attention = base.d_model / config.d_model, (base.head_dim / config.head_dim) ** 0.5
    if logits != 1.0 and config.tie_embeddings:
        raise UsageError(
            "tie_embeddings=True: muP's multiplier of the logits cannot be folded into a head that is the "
            f"embedding too: multiply the logits by {logits:g} in the other program, or untie"
        )
    queries = ".attn.q_norm." if config.qk_norm else ".attn.q."

    def factor(name: str) -> float:
        return logits if name == "head.weight" else attention if queries in name else 1.0

    return factor


@torch.no_grad()
def folded_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict of `Decoder(decoder.config)`, without a base, that gives the same logits as `decoder`.

    To continue training, use the unfolded weights: muP's learning rates fit only those.

    Args:
        decoder: with weights, not sharded.

    Raises:
        UsageError: see `fold_factors`.
    """
    factor = fold_factors(decoder.config, decoder.base)
    return {name: tensor * factor(name) for name, tensor in decoder.state_dict().items()}
