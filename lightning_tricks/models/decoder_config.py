"""The shape of a decoder: `Llama` and `GPT2`, two families of one model that differ in their fields alone.

Name the family and the settings that differ from its defaults, which are those of the published model.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lightning_tricks._core.errors import UsageError, check_choice, check_count

__all__ = ["GPT2", "DecoderConfig", "Llama"]

Activation = Literal["swiglu", "gelu", "relu2"]
QKNorm = bool | Literal["whole"]
RouterScore = Literal["softmax", "sigmoid"]
Balance = Literal["bias", "none"]
# of a mixture alone: they change nothing without experts
_OF_EXPERTS = ("d_expert", "n_shared_experts", "dense_layers", "sequence_balance_weight", "router_z_weight")

_OF_DATA: Any = None  # a size that is not given
if TYPE_CHECKING:
    Size = int  # as soon as the config exists
else:
    Size = int | None  # in a recipe


class DecoderConfig(abc.ABC):
    """The settings that `Decoder` is built from; the families below describe them.

    A recipe names a family: `decoder: {class_path: Llama, init_args: {d_model: 256, n_layers: 4, n_heads: 4}}`.
    This base is no dataclass: jsonargparse lets `class_path` choose among the subclasses of plain classes only.
    """

    norm: ClassVar[Literal["rms", "layer"]]
    positions: ClassVar[Literal["rope", "learned"]]
    taken_over: ClassVar = ("vocab_size", "d_model", "n_layers", "n_heads", "max_seq_len")
    """Settings that stay when an override names another family: the sizes, which both families have."""

    _published: ClassVar[Mapping[str, int]] = {}
    """Of the published model: `vocab_size` and `max_seq_len`, where they are not given and no data say them."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None
    d_ff: int | None
    max_seq_len: int
    activation: Activation
    norm_eps: float
    tie_embeddings: bool
    qk_norm: QKNorm
    init_std: float
    zero_init_outputs: bool
    logit_softcap: float | None

    @property
    def bias(self) -> bool:
        """Biases in linear layers and norms; a family without the option has none."""
        return False

    @property
    def n_experts(self) -> int | None:
        """Experts of each mixture; a family without the option has none."""
        return None

    @property
    def rope_theta(self) -> float:
        """Base of the rotary wavelengths, read where `positions` is `rope`."""
        return 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: `n_kv_heads`, or as many as queries have."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_width(self) -> int:
        """Hidden width of the MLP: `d_ff`, or 4 d, or with a gate Llama's 8/3 d rounded up to a multiple of 256."""
        if self.d_ff is not None:
            return self.d_ff
        if self.activation == "swiglu":
            return 256 * math.ceil(int(8 * self.d_model / 3) / 256)
        return 4 * self.d_model

    def of_data(self, vocab_size: int | None, seq_len: int | None) -> Self:
        """The same for data of these sizes, which stand in for `vocab_size` and `max_seq_len` that were not given."""
        sizes = {"vocab_size": vocab_size, "max_seq_len": seq_len}
        found = {name: size for name, size in sizes.items() if name in self._not_given and size is not None}
        return dataclasses.replace(self, **found) if found else self  # type: ignore[type-var]

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built."""
        self._not_given: list[str]
        vars(self)["_not_given"] = [name for name in self._published if getattr(self, name) is None]
        for name in self._not_given:
            vars(self)[name] = self._published[name]
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_seq_len"):
            value = getattr(self, name)
            if value is not None or name not in ("n_kv_heads", "d_ff"):
                check_count(name, value)
        for name in (
            "norm_eps",
            "rope_theta",
            "init_std",
            *(["logit_softcap"] if self.logit_softcap is not None else []),
        ):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise UsageError(f"{name}={value}: give a positive number")
        check_choice("activation", self.activation, Activation)
        if self.qk_norm not in (True, False, "whole"):
            raise UsageError(f"qk_norm={self.qk_norm}: give true, false or, of a Llama, whole")
        if self.d_model % self.n_heads:
            raise UsageError(f"d_model={self.d_model} is no multiple of n_heads={self.n_heads}: change one of them")
        if self.n_heads % self.kv_heads:
            raise UsageError(f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}: give a divisor")
        if self.positions == "rope" and self.head_dim % 2:
            raise UsageError(
                f"d_model={self.d_model} over n_heads={self.n_heads} makes heads {self.head_dim} wide: "
                "rotary positions need an even width, change one of them"
            )


@dataclasses.dataclass(frozen=True)
class Llama(DecoderConfig):
    """RMSNorm, rotary positions, gated MLP, no biases. Defaults are Llama-2-7B: 6,738,415,616 parameters.

    Args:
        vocab_size: number of tokens the model knows. Default: in a LanguageModel that of the data, else 32,000.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads; divides d_model.
        n_kv_heads: key and value heads; divides n_heads. Default: n_heads.
        d_ff: hidden width of the MLP. Default: 8/3 d_model rounded up to a multiple of 256; without a gate 4 d_model.
        max_seq_len: longest sequence, in tokens. Default: in a LanguageModel the data's seq_len, else 4,096.
        activation: swiglu (gated), gelu (tanh form) or relu2 (squared ReLU), the last two without a gate.
        norm_eps: added to the mean square inside each norm.
        rope_theta: base of the rotary wavelengths.
        tie_embeddings: one matrix for the embedding and the output head.
        qk_norm: RMS-normalise each head's queries and keys before the rotation, as Qwen3 does; `whole` normalises those
            of all heads together, as OLMoE does.
        init_std: standard deviation of the initial weights.
        zero_init_outputs: start the projections that write to the residual stream at zero.
        logit_softcap: bounds the logits: cap * tanh(logits / cap). None: they are as they are.
        n_experts: gated MLPs in place of that of a block, of which each token takes some. None: all blocks are dense.
        experts_per_token: experts that the router chooses for each token.
        d_expert: hidden width of one expert. Default: that of the MLP.
        n_shared_experts: experts that all tokens take beside them, as one MLP of so many times d_expert.
        router: softmax or sigmoid, of the router's logits; the chosen ones are the weights of the experts' outputs.
        normalize_router: divide the weights of a token by their sum.
        router_scale: multiplies the weights.
        router_groups: equal groups of experts, of which a token's best are taken first, as in DeepSeek-V3.
        groups_per_token: groups among which a token's experts are chosen.
        balance: `bias` adds a number to each expert's scores where experts are chosen, and moves it after each
            optimizer step; `none` does not.
        balance_rate: by how much it moves; 0.001 is DeepSeek-V3's.
        sequence_balance_weight: of a loss that evens out the loads in each row; DeepSeek-V3 has 0.0001.
        router_z_weight: of a loss that keeps the router's logits small; OLMoE has 0.001.
        dense_layers: blocks at the beginning that have an MLP.
    """

    norm: ClassVar[Literal["rms", "layer"]] = "rms"
    positions: ClassVar[Literal["rope", "learned"]] = "rope"

    _published: ClassVar[Mapping[str, int]] = {"vocab_size": 32000, "max_seq_len": 4096}

    vocab_size: Size = _OF_DATA
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    d_ff: int | None = None
    max_seq_len: Size = _OF_DATA
    activation: Activation = "swiglu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    qk_norm: QKNorm = False
    init_std: float = 0.02
    zero_init_outputs: bool = False
    logit_softcap: float | None = None
    n_experts: int | None = None
    experts_per_token: int = 2
    d_expert: int | None = None
    n_shared_experts: int = 0
    router: RouterScore = "softmax"
    normalize_router: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    groups_per_token: int = 1
    balance: Balance = "bias"
    balance_rate: float = 1e-3
    sequence_balance_weight: float = 0.0
    router_z_weight: float = 0.0
    dense_layers: int = 0

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert: `d_expert`, or that of the MLP."""
        return self.ffn_width if self.d_expert is None else self.d_expert

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built."""
        super().__post_init__()
        check_choice("router", self.router, RouterScore)
        check_choice("balance", self.balance, Balance)
        if self.n_experts is None:
            for name in _OF_EXPERTS:
                if value := getattr(self, name):
                    raise UsageError(f"{name}={value} without experts: set n_experts, or leave it out")
            return
        for name, least, most in (
            ("n_experts", 2, 65536),
            ("router_groups", 1, self.n_experts),
            ("experts_per_token", 1, self.n_experts),
            ("n_shared_experts", 0, 65536),
            ("dense_layers", 0, self.n_layers - 1),
            ("groups_per_token", 1, self.router_groups),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UsageError(f"{name}={value}: give a whole number from {least} to {most}")
        for name in ("balance_rate", "sequence_balance_weight", "router_z_weight", "router_scale"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float)
            if not is_number or not 0 <= value < math.inf or (name == "router_scale" and value == 0):
                raise UsageError(f"{name}={value}: give a {'positive number' if value == 0 else 'number from 0 on'}")
        if self.activation != "swiglu":
            raise UsageError(f"n_experts={self.n_experts}: experts are gated: set activation to swiglu")
        for name, width in (("d_model", self.d_model), ("d_expert", self.expert_width)):
            if not isinstance(width, int) or width % 8 or width < 8:
                raise UsageError(f"{name}={width}: products of experts need a multiple of 8, 16 bytes in bf16")
        per_group = self.n_experts // self.router_groups
        if self.router_groups > 1 and (per_group < 2 or self.n_experts % self.router_groups):
            raise UsageError(
                f"router_groups={self.router_groups} does not divide n_experts={self.n_experts} into equal groups of "
                "at least 2: give another number"
            )
        if self.experts_per_token > self.groups_per_token * per_group:
            raise UsageError(
                f"experts_per_token={self.experts_per_token}: {self.groups_per_token} groups have "
                f"{self.groups_per_token * per_group} experts: raise groups_per_token"
            )
        if self.experts_per_token == 1 and self.normalize_router:
            raise UsageError(
                "experts_per_token=1: divided by their sum, all weights are 1, and the router learns nothing: set "
                "normalize_router to false"
            )


@dataclasses.dataclass(frozen=True)
class GPT2(DecoderConfig):
    """LayerNorm, learned positions, GELU, biases, tied head. Defaults are GPT-2 124M: 124,439,808 parameters.

    Args:
        vocab_size: number of tokens the model knows. Default: in a LanguageModel that of the data, else 50,257.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads; divides d_model.
        n_kv_heads: key and value heads; divides n_heads. Default: n_heads.
        d_ff: hidden width of the MLP. Default: 4 d_model; with a gate 8/3 d_model rounded up to a multiple of 256.
        max_seq_len: longest sequence, in tokens; the table of positions has as many rows. Default: in a LanguageModel
            the data's seq_len, else 1,024.
        activation: gelu (tanh form), relu2 (squared ReLU) or swiglu (gated).
        norm_eps: added to the variance inside each norm.
        bias: biases in every linear layer but the head, and in the norms.
        tie_embeddings: one matrix for the embedding and the output head.
        qk_norm: RMS-normalise each head's queries and keys, as Qwen3 does.
        init_std: standard deviation of the initial weights.
        zero_init_outputs: start the projections that write to the residual stream at zero.
        logit_softcap: bounds the logits: cap * tanh(logits / cap). None: they are as they are.
    """

    norm: ClassVar[Literal["rms", "layer"]] = "layer"
    positions: ClassVar[Literal["rope", "learned"]] = "learned"

    _published: ClassVar[Mapping[str, int]] = {"vocab_size": 50257, "max_seq_len": 1024}

    vocab_size: Size = _OF_DATA
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int | None = None
    d_ff: int | None = None
    max_seq_len: Size = _OF_DATA
    activation: Activation = "gelu"
    norm_eps: float = 1e-5
    bias: bool = True
    tie_embeddings: bool = True
    qk_norm: bool = False
    init_std: float = 0.02
    zero_init_outputs: bool = False
    logit_softcap: float | None = None
