"""The cost of a run in FLOPs and wall time: arithmetic, no Lightning; torch is imported only to count or measure."""

from typing import TYPE_CHECKING, Any

from lightning_tricks.accounting.flops import (
    Attention,
    Checkpointing,
    DecoderShape,
    attention_flops_per_token,
    matmul_parameters,
    recompute_flops_per_token,
    training_flops_per_token,
)
from lightning_tricks.accounting.gpus import peak_flops, peak_source

if TYPE_CHECKING:
    from lightning_tricks.accounting.flop_counting import CannotCount, count_flops

__all__ = [
    "Attention",
    "CannotCount",
    "Checkpointing",
    "DecoderShape",
    "attention_flops_per_token",
    "count_flops",
    "matmul_parameters",
    "peak_flops",
    "peak_source",
    "recompute_flops_per_token",
    "training_flops_per_token",
]


def __getattr__(name: str) -> Any:
    if name not in ("CannotCount", "count_flops"):
        raise AttributeError(f"module 'lightning_tricks.accounting' has no attribute {name!r}")
    from lightning_tricks.accounting import flop_counting  # needs torch

    return getattr(flop_counting, name)
