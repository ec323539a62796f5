"""The reference decoder: one model, Llama or GPT-2 by its config."""

from lightning_tricks.models.decoder import Decoder
from lightning_tricks.models.decoder_config import GPT2, DecoderConfig, Llama
from lightning_tricks.models.generate import Sampling, generate
from lightning_tricks.models.hf_adapter import (
    decoder_config,
    fold_factors,
    folded_state,
    from_hf,
    hf_config,
    hf_family,
    hf_weights,
    to_hf,
)

__all__ = [
    "GPT2",
    "Decoder",
    "DecoderConfig",
    "Llama",
    "Sampling",
    "decoder_config",
    "fold_factors",
    "folded_state",
    "from_hf",
    "generate",
    "hf_config",
    "hf_family",
    "hf_weights",
    "to_hf",
]
