"""The reference decoder: one model, Llama or GPT-2 by its config."""

from lightning_tricks.models.decoder import Decoder
from lightning_tricks.models.decoder_config import GPT2, DecoderConfig, Llama
from lightning_tricks.models.generate import Sampling, generate
from lightning_tricks.models.hf_weights import folded_state, gpt2_state_from_hf, llama_state_from_hf

__all__ = [
    "GPT2",
    "Decoder",
    "DecoderConfig",
    "Llama",
    "Sampling",
    "folded_state",
    "generate",
    "gpt2_state_from_hf",
    "llama_state_from_hf",
]
