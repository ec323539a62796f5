"""FLOPs that training spends on one token, as a formula, in two definitions: causal and full attention.

MFU is this number times tokens/s, divided by the device's peak FLOP/s.
"""

from typing import Literal, Protocol

from lightning_tricks._core.errors import UsageError, check_choice

__all__ = ["training_flops_per_token"]

Attention = Literal["causal", "full"]


class DecoderShape(Protocol):
    """The numbers that decide the FLOPs of a decoder; `Llama` and `GPT2` have them, and so may any object.

    A mixture of experts has two more, `n_experts` and `experts_per_token`, and may have `expert_width` (else an expert
    is as wide as the MLP), `n_shared_experts` and `dense_layers`, which have an MLP.
    """

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def n_layers(self) -> int:
        """Number of blocks."""

    @property
    def n_heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""

    @property
    def ffn_width(self) -> int:
        """Hidden width of the MLP."""

    @property
    def activation(self) -> str:
        """`swiglu` has three matrices in its MLP, every other name two."""


def matmul_parameters(shape: DecoderShape, active: bool = True) -> int:
    """Number of weights that each token is multiplied with: blocks and head, without embeddings, biases and norms.

    A tied head counts too: the embedding is a look-up, the head a product. In a mixture of experts, the experts that a
    token is sent to count, the shared ones, and the router that chooses them. Llama-2-7B: 6,607,077,376.

    Args:
        shape: of the decoder.
        active: False counts all experts in place of those of a token.

    Raises:
        UsageError: `n_experts` without an `experts_per_token` between 1 and `n_experts`.
    """
    dense, mixtures, experts, shared = layer_counts(shape)
    n_experts = getattr(shape, "n_experts", None) or 0
    widths = dense * shape.ffn_width + mixtures * (shared + (experts if active else n_experts)) * expert_width(shape)
    rows = mlp_matrices(shape) * widths + mixtures * n_experts + shape.vocab_size
    return shape.n_layers * projection_weights(shape) + rows * shape.d_model


def layer_counts(shape: DecoderShape) -> tuple[int, int, int, int]:
    """Dense blocks, blocks with experts, experts of each token there, and shared experts."""
    n_experts = getattr(shape, "n_experts", None)
    if not n_experts:
        return shape.n_layers, 0, 0, 0
    active = getattr(shape, "experts_per_token", None)
    if active is None or not 1 <= active <= n_experts:
        raise UsageError(f"experts_per_token={active!r}: give a number from 1 to n_experts={n_experts}")
    dense = getattr(shape, "dense_layers", 0)
    return dense, shape.n_layers - dense, active, getattr(shape, "n_shared_experts", 0)


def expert_width(shape: DecoderShape) -> int:
    """Hidden width of one expert."""
    width: int = getattr(shape, "expert_width", shape.ffn_width)
    return width


def projection_weights(shape: DecoderShape) -> int:
    """Weights of one block's four projections: queries and output are of one size, keys and values of another."""
    return 2 * shape.d_model * shape.head_dim * (shape.n_heads + shape.kv_heads)


def mlp_matrices(shape: DecoderShape) -> int:
    """Number of matrices of an MLP."""
    return 3 if shape.activation == "swiglu" else 2


def attention_flops_per_token(shape: DecoderShape, seq_len: int, attention: Attention) -> int:
    """FLOPs of the two products between tokens, scores and weighted values, forward and backward, for one token.

    A product with n keys takes 2 n head_dim FLOPs a head. Two products, and twice as many FLOPs backward, make
    12 n_layers n_heads head_dim n. With `full`, n is `seq_len`; with `causal` it is half of that, the number of keys
    that a token sees on average. Arguments as in `training_flops_per_token`.

    Raises:
        UsageError: another definition, or a length below 1.
    """
    check_choice("attention", attention, Attention)
    if seq_len < 1:
        raise UsageError(f"seq_len={seq_len}: give a length of at least 1 token")
    full = 12 * shape.n_layers * shape.n_heads * shape.head_dim * seq_len
    return full // 2 if attention == "causal" else full


def training_flops_per_token(shape: DecoderShape, seq_len: int, attention: Attention) -> int:
    """FLOPs of forward and backward pass for one token: 6 x `matmul_parameters` + `attention_flops_per_token`.

    State the definition beside every figure; there is no default. `causal` counts what a causal model needs. `full`
    counts attention as if no token were masked, as PaLM, nanoGPT and torchtitan do: use it to compare with published
    MFU. Neither counts what activation checkpointing or flash attention computes twice, nor norms, activations,
    softmax and the optimizer. Llama-2-7B at 4096 tokens: 42.86 G causal, 46.08 G full.

    Args:
        shape: `Llama(...)`, `GPT2(...)` or any object with the fields of `DecoderShape`.
        seq_len: T, tokens in a row; rows of packed documents count as one row.
        attention: `causal` or `full`.

    Raises:
        UsageError: see `attention_flops_per_token`.

    Example:
        >>> from types import SimpleNamespace
        >>> one = SimpleNamespace(vocab_size=10, d_model=4, n_layers=1, n_heads=2, kv_heads=1, head_dim=2,
        ...                       ffn_width=8, activation="gelu")
        >>> training_flops_per_token(one, seq_len=6, attention="full")  # 6 * (48 + 64 + 40) + 12 * 2 * 2 * 6
        1200

    Source: `estimate_mfu` in https://github.com/karpathy/nanoGPT/blob/master/model.py and
        `quadratic_attention_flops_per_token` in
        https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/utils.py, both full; nanoGPT cites PaLM,
        appendix B (Chowdhery et al. 2022).
    """
    return 6 * matmul_parameters(shape) + attention_flops_per_token(shape, seq_len, attention)
