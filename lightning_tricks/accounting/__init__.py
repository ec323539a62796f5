"""What a run costs: arithmetic on plain numbers, no torch and no Lightning."""

from lightning_tricks.accounting.flops import (
    Attention,
    DecoderShape,
    attention_flops_per_token,
    matmul_parameters,
    training_flops_per_token,
)

__all__ = [
    "Attention",
    "DecoderShape",
    "attention_flops_per_token",
    "matmul_parameters",
    "training_flops_per_token",
]
