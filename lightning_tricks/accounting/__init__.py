"""What a run costs: arithmetic on plain numbers, no Lightning; torch is imported only where something is measured."""

from lightning_tricks.accounting.flops import (
    Attention,
    Checkpointing,
    DecoderShape,
    attention_flops_per_token,
    matmul_parameters,
    recompute_flops_per_token,
    training_flops_per_token,
)
from lightning_tricks.accounting.measured_flops import CannotCount, count_flops
from lightning_tricks.accounting.peak_flops import measure_peak_flops, peak_flops, peak_source

__all__ = [
    "Attention",
    "CannotCount",
    "Checkpointing",
    "DecoderShape",
    "attention_flops_per_token",
    "count_flops",
    "matmul_parameters",
    "measure_peak_flops",
    "peak_flops",
    "peak_source",
    "recompute_flops_per_token",
    "training_flops_per_token",
]
