"""Activation checkpointing on paper: what each block keeps and computes again, and the modes that meet a budget.

A budget is the share of the activations' bytes that stay, between those of `full` (0) and those of `none` (1).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from lightning_tricks._core.errors import UsageError, check_choice
from lightning_tricks.accounting.flops import (
    Attention,
    DecoderShape,
    attention_flops_per_token,
    expert_width,
    layer_counts,
    mlp_matrices,
    projection_weights,
)

__all__ = ["recompute_flops_per_token"]

Mode = Literal["none", "cheap", "selective", "full"]  # each keeps less than the one before
Checkpointing = Mode | dict[str, float]  # of all blocks, or {"budget": share}


def check_checkpointing(given: Any) -> Checkpointing:
    """A mode, or a dict with the one key `budget`; None is `none`.

    Raises:
        UsageError: another value.
    """
    if not isinstance(given, Mapping):
        check_choice("activation_checkpointing", given or "none", Mode, " or {budget: 0.5}")
        return given or "none"
    share: Any = given.get("budget")
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if len(given) != 1 or not is_number or not 0 <= share <= 1:
        raise UsageError(
            f"activation_checkpointing={dict(given)}: give {{budget: SHARE}}, the share of the activations' bytes to "
            "keep, from 0 (as full) to 1 (as none)"
        )
    return {"budget": float(share)}


def recompute_flops_per_token(
    shape: DecoderShape, seq_len: int, attention: Attention, activation_checkpointing: Checkpointing
) -> int:
    """FLOPs for one token that activation checkpointing of our decoder adds to `training_flops_per_token`.

    Add them for HFU, which counts all work of the hardware. `full` repeats all products of a block but the last one,
    `down`, which is not needed; `selective` repeats the products that it does not keep: `k`, `o`, and `up` of a gated
    MLP and of experts; `cheap` repeats none, and no mode a router. A budget is the sum over the modes of its blocks.
    The head is outside the blocks. Work that a fused attention kernel repeats inside itself is not counted. On a CPU in
    bf16, short rows have no fused kernel, and `cheap` and `selective` then repeat attention too; that is not counted
    either.

    Args:
        shape: as in `training_flops_per_token`; for a budget its `max_seq_len` counts, if it has one.
        seq_len: as in `training_flops_per_token`.
        attention: as in `training_flops_per_token`.
        activation_checkpointing: `none`, `cheap`, `selective`, `full` or `{"budget": 0.5}`, as in `LanguageModel`.

    Raises:
        UsageError: another mode, or a share outside of 0 to 1; see also `attention_flops_per_token`.

    Source: `lightning_tricks/parallel/activation_checkpointing.py`, which says what is kept. MFU and HFU as in
        https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md.
    """
    of_attention = attention_flops_per_token(shape, seq_len, attention) // 3 // shape.n_layers  # forward, of a block
    modes = enumerate(modes_of_blocks(shape, activation_checkpointing, getattr(shape, "max_seq_len", seq_len)))
    dense = layer_counts(shape)[0]
    counts = Counter((number >= dense, mode) for number, mode in modes)
    return sum(count * _flops_again(shape, *kind, of_attention) for kind, count in counts.items())


def modes_of_blocks(shape: DecoderShape, activation_checkpointing: Checkpointing, seq_len: int) -> list[Mode]:
    """The mode of each block: those of a budget keep at most its share, and compute the fewest FLOPs again.

    A block goes from `none` to the modes on the lower convex hull of its kept numbers and repeated FLOPs, and blocks
    take the steps that cost least for what they save. Those that are a step ahead lie evenly among the others, so that
    each pipeline stage keeps its share, and no part of the backward pass has all of the repeated work.

    Args:
        shape: as in `training_flops_per_token`.
        activation_checkpointing: a mode, or a budget.
        seq_len: tokens in a row, on which the FLOPs of attention depend.

    Raises:
        UsageError: see `check_checkpointing`.
    """
    given = check_checkpointing(activation_checkpointing)
    if isinstance(given, str):
        return [given] * shape.n_layers
    dense, mixtures, *_ = layer_counts(shape)
    kinds = {False: range(dense), True: range(dense, dense + mixtures)}
    of_attention = attention_flops_per_token(shape, seq_len, "causal") // 3 // shape.n_layers
    steps = sorted(
        (step, kind) for kind, blocks in kinds.items() if blocks for step in _steps(shape, kind, of_attention)
    )
    modes: list[Mode] = ["none"] * shape.n_layers
    left = (1 - given["budget"]) * sum(step.saved * len(kinds[kind]) for step, kind in steps)
    for step, kind in steps:
        blocks = kinds[kind]
        count = min(len(blocks), math.ceil(left / step.saved - 1e-9))
        for place in range(count):
            modes[blocks[(2 * place + 1) * len(blocks) // (2 * count)]] = step.mode
        left -= count * step.saved
        if left <= 0:
            break
    return modes


class _Step(NamedTuple):
    """From one mode to another, for one block.

    Attributes:
        cost: FLOPs for each number that is not kept any more.
        saved: numbers of 16 bits, for a token.
        mode: the new one.
    """

    cost: float
    saved: int
    mode: Mode


def _steps(shape: DecoderShape, is_mixture: bool, of_attention: int) -> Iterator[_Step]:
    """The steps along the lower convex hull from `none` to `full`, the cheapest first."""
    points = [
        (mode, numbers_kept(shape, mode, is_mixture), _flops_again(shape, is_mixture, mode, of_attention))
        for mode in get_args(Mode)
    ]
    while len(points) > 1:
        (_, kept, again), *others = points
        steps = [_Step((more - again) / (kept - fewer), kept - fewer, mode) for mode, fewer, more in others]
        best = min(steps)
        yield best
        points = others[steps.index(best) :]


def numbers_kept(shape: DecoderShape, mode: Mode, is_mixture: bool = False) -> int:
    """Numbers of 16 bits that a compiled block keeps for each token, of a residual stream in 16 bits.

    `full`: the block's input. `selective` and `cheap`: also linear layers, attention and its fp32 number of each head.
    `none`: the input and the stream between attention and MLP, what both norms return, queries, keys, values, attention
    and of a gated MLP gate, up and their product, of others what goes into the activation and what comes out.
    """
    _, _, experts, shared = layer_counts(shape)
    width = shared * expert_width(shape) if is_mixture else shape.ffn_width
    experts, of_experts = (experts, experts * expert_width(shape)) if is_mixture else (0, 0)
    d, gated = shape.d_model, mlp_matrices(shape) - 2
    queries, keys = shape.n_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * queries + keys + 2 * shape.n_heads  # with values
    return {
        "full": d,
        "selective": d + attention + width + of_experts + experts * d,
        "cheap": 2 * d + attention + keys + (1 + gated) * width + 2 * of_experts + experts * d,
        "none": 4 * d + attention + keys + (2 + gated) * width + 3 * of_experts + 2 * experts * d,
    }[mode]


def _flops_again(shape: DecoderShape, is_mixture: bool, mode: Mode, of_attention: int) -> int:
    """FLOPs for one token that a block computes again."""
    if mode in ("none", "cheap"):
        return 0
    _, _, experts, shared = layer_counts(shape)
    width = shape.d_model * (shared * expert_width(shape) if is_mixture else shape.ffn_width)  # of one matrix
    of_experts = shape.d_model * experts * expert_width(shape) if is_mixture else 0
    matrices, projections = mlp_matrices(shape), projection_weights(shape)
    if mode == "full":  # all but an MLP's down; the router's gradient reads that of experts
        return 2 * (projections + (matrices - 1) * width + matrices * of_experts) + of_attention
    # k and o are half of the projections' weights; a gated MLP repeats one of gate and up, any other keeps up
    return 2 * (projections // 2 + (matrices - 2) * (width + of_experts))
