"""Activation checkpointing on paper: what each block keeps and computes again, and the modes that meet a budget."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_tricks._core.errors import check_choice
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
Checkpointing = Mode | dict[str, Any]  # of all blocks, or {"budget": share}, which `check_checkpointing` checks


def check_checkpointing(given: Any) -> Checkpointing:
    """A mode, or `{"budget": share}`: the share of the activations' bytes that stay. None is `none`.

    Raises:
        UsageError: another value.
    """
    share: Any = given.get("budget") if isinstance(given, Mapping) and len(given) == 1 else None
    if type(share) in (int, float) and 0 <= share <= 1:
        return {"budget": float(share)}
    more = ", or {budget: SHARE}, the share of the activations' bytes to keep, from 0 (as full) to 1 (as none)"
    check_choice("activation_checkpointing", "none" if given is None else given, Mode, more)
    return given or "none"


def recompute_flops_per_token(
    shape: DecoderShape,
    seq_len: int,
    attention: Attention,
    activation_checkpointing: Checkpointing,
    fused: bool = False,
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
        fused: as `fused_projections` there; `selective` then repeats `o`, `gate` and `up`, and of experts `up`.

    Raises:
        UsageError: another mode, or a share outside of 0 to 1; see also `attention_flops_per_token`.

    Source: `lightning_tricks/parallel/activation_checkpointing.py`, which says what is kept. MFU and HFU as in
        https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md.
    """
    costs = _costs_of_kinds(shape, seq_len, attention, fused)
    modes = enumerate(modes_of_blocks(shape, activation_checkpointing, getattr(shape, "max_seq_len", seq_len), fused))
    dense = layer_counts(shape)[0]
    counts = Counter((number >= dense, mode) for number, mode in modes)
    return sum(count * costs[kind][mode][1] for (kind, mode), count in counts.items())


def modes_of_blocks(
    shape: DecoderShape, activation_checkpointing: Checkpointing, seq_len: int, fused: bool = False
) -> list[Mode]:
    """The mode of each block: those of a budget keep at most its share, and compute the fewest FLOPs again.

    Blocks go from `none` to the modes on the lower convex hull of kept numbers and repeated FLOPs, the steps first that
    cost least for what they save. Blocks that are a step ahead lie evenly among the others, so that each pipeline stage
    keeps its share. `seq_len` decides the FLOPs of attention.
    """
    given = check_checkpointing(activation_checkpointing)
    if isinstance(given, str):
        return [given] * shape.n_layers
    dense = layer_counts(shape)[0]
    blocks = {False: range(dense), True: range(dense, shape.n_layers)}
    costs = _costs_of_kinds(shape, seq_len, "causal", fused)
    steps = sorted((*step, kind) for kind in blocks if blocks[kind] for step in _steps(costs[kind]))
    modes: list[Mode] = ["none"] * shape.n_layers
    left = (1 - given["budget"]) * sum(saved * len(blocks[kind]) for _, saved, _, kind in steps)
    for _, saved, mode, kind in steps:
        own = blocks[kind]
        count = min(len(own), max(0, math.ceil(left / saved - 1e-9)))
        for place in range(count):
            modes[own[(2 * place + 1) * len(own) // (2 * count)]] = mode
        left -= count * saved
    return modes


def _steps(costs: Mapping[Mode, tuple[int, int]]) -> Iterator[tuple[float, int, Mode]]:
    """Along the lower convex hull: FLOPs for each number that is not kept any more, these numbers, the next mode."""
    points = list(costs.items())
    while len(points) > 1:
        (_, (kept, again)), *points = points
        steps = [((more - again) / (kept - fewer), kept - fewer, mode) for mode, (fewer, more) in points]
        best = min(steps)
        yield best
        points = points[steps.index(best) :]


def _costs_of_kinds(
    shape: DecoderShape, seq_len: int, attention: Attention, fused: bool
) -> list[dict[Mode, tuple[int, int]]]:
    of_attention = attention_flops_per_token(shape, seq_len, attention) // 3 // shape.n_layers  # forward, of a block
    return [costs_of_block(shape, is_mixture, of_attention, fused) for is_mixture in (False, True)]


def costs_of_block(
    shape: DecoderShape, is_mixture: bool, of_attention: int, fused: bool = False
) -> dict[Mode, tuple[int, int]]:
    """Numbers of 16 bits that a compiled block keeps for a token in each mode, and FLOPs that it computes again.

    Each mode but `full` keeps queries, values, attention and its fp32 number of each head, and of a gated MLP `gate`.
    `cheap` and `none` keep keys and `up`; `cheap` the output of `o`; `none` the stream between attention and MLP, what
    both norms return, and what the activation returns. With fused projections `selective` keeps keys, and of the MLP
    nothing: it has the first product only.
    """
    _, _, experts, shared = layer_counts(shape)
    width, experts = (shared * expert_width(shape), experts) if is_mixture else (shape.ffn_width, 0)
    rows, d, matrices = experts * expert_width(shape), shape.d_model, mlp_matrices(shape)
    keys = shape.kv_heads * shape.head_dim
    base = d + 2 * shape.n_heads * (shape.head_dim + 1) + keys + width + rows + experts * d
    cheap = base + keys + d + (matrices - 2) * width + rows
    # k and o are half of the projections' weights; a gated MLP repeats one of gate and up, any other keeps up
    some = projection_weights(shape) // 2 + d * (matrices - 2) * (width + rows)
    selective = base, 2 * some
    if fused:
        again = d * (shape.n_heads * shape.head_dim + (matrices - 1) * width + (matrices - 2) * rows)
        selective = base + keys - width, 2 * again
    # all but an MLP's down; the router's gradient reads that of experts
    every = projection_weights(shape) + d * ((matrices - 1) * width + matrices * rows)
    return {
        "none": (cheap + 2 * d + width + rows + experts * d, 0),
        "cheap": (cheap, 0),
        "selective": selective,
        "full": (d, 2 * every + of_attention),
    }
