"""The shape of a decoder: `Llama` and `GPT2`, two families of one model that differ in their fields alone.

Name the family and the settings that differ from its defaults, which are those of the published model.
"""

import abc
import dataclasses
import math
from typing import ClassVar, Literal

from lightning_tricks._core.errors import UsageError, check_choice

__all__ = ["GPT2", "DecoderConfig", "Llama"]

Activation = Literal["swiglu", "gelu", "relu2"]


class DecoderConfig(abc.ABC):
    """The settings that `Decoder` is built from; the families below describe them.

    A recipe names a family: `decoder: {class_path: Llama, init_args: {d_model: 256, n_layers: 4, n_heads: 4}}`.
    This base is no dataclass: jsonargparse lets `class_path` choose among the subclasses of plain classes only.
    """

    norm: ClassVar[Literal["rms", "layer"]]
    positions: ClassVar[Literal["rope", "learned"]]
    taken_over: ClassVar = ("vocab_size", "d_model", "n_layers", "n_heads", "max_seq_len")
    """Settings that stay when an override names another family: the sizes, which both families have."""

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
    qk_norm: bool
    init_std: float
    zero_init_outputs: bool

    @property
    def bias(self) -> bool:
        """Biases in linear layers and norms; a family without the option has none."""
        return False

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

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built."""
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_seq_len"):
            value = getattr(self, name)
            if value is None and name in ("n_kv_heads", "d_ff"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value}: give a whole number of at least 1")
        for name in ("norm_eps", "rope_theta", "init_std"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise UsageError(f"{name}={value}: give a positive number")
        check_choice("activation", self.activation, Activation)
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
        vocab_size: number of tokens the model knows.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads; divides d_model.
        n_kv_heads: key and value heads; divides n_heads. Default: n_heads.
        d_ff: hidden width of the MLP. Default: 8/3 d_model rounded up to a multiple of 256; without a gate 4 d_model.
        max_seq_len: longest sequence, in tokens.
        activation: swiglu (gated), gelu (tanh form) or relu2 (squared ReLU), the last two without a gate.
        norm_eps: added to the mean square inside each norm.
        rope_theta: base of the rotary wavelengths.
        tie_embeddings: one matrix for the embedding and the output head.
        qk_norm: RMS-normalise each head's queries and keys before the rotation, as Qwen3 does.
        init_std: standard deviation of the initial weights.
        zero_init_outputs: start the projections that write to the residual stream at zero.
    """

    norm: ClassVar[Literal["rms", "layer"]] = "rms"
    positions: ClassVar[Literal["rope", "learned"]] = "rope"

    vocab_size: int = 32000
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    d_ff: int | None = None
    max_seq_len: int = 4096
    activation: Activation = "swiglu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    qk_norm: bool = False
    init_std: float = 0.02
    zero_init_outputs: bool = False


@dataclasses.dataclass(frozen=True)
class GPT2(DecoderConfig):
    """LayerNorm, learned positions, GELU, biases, tied head. Defaults are GPT-2 124M: 124,439,808 parameters.

    Args:
        vocab_size: number of tokens the model knows.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads; divides d_model.
        n_kv_heads: key and value heads; divides n_heads. Default: n_heads.
        d_ff: hidden width of the MLP. Default: 4 d_model; with a gate 8/3 d_model rounded up to a multiple of 256.
        max_seq_len: longest sequence, in tokens; the table of positions has as many rows.
        activation: gelu (tanh form), relu2 (squared ReLU) or swiglu (gated).
        norm_eps: added to the variance inside each norm.
        bias: biases in every linear layer but the head, and in the norms.
        tie_embeddings: one matrix for the embedding and the output head.
        qk_norm: RMS-normalise each head's queries and keys, as Qwen3 does.
        init_std: standard deviation of the initial weights.
        zero_init_outputs: start the projections that write to the residual stream at zero.
    """

    norm: ClassVar[Literal["rms", "layer"]] = "layer"
    positions: ClassVar[Literal["rope", "learned"]] = "learned"

    vocab_size: int = 50257
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_heads: int | None = None
    d_ff: int | None = None
    max_seq_len: int = 1024
    activation: Activation = "gelu"
    norm_eps: float = 1e-5
    bias: bool = True
    tie_embeddings: bool = True
    qk_norm: bool = False
    init_std: float = 0.02
    zero_init_outputs: bool = False
