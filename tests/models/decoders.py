"""Small decoders of both families, with each of their options once."""

import torch

from lightning_tricks.models import GPT2, Decoder, Llama

TINY = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 24}
CONFIGS = {
    "llama": Llama(**TINY),
    "llama-all": Llama(**TINY, n_kv_heads=2, qk_norm=True, activation="relu2", tie_embeddings=True),
    "gpt2": GPT2(**TINY),
    "gpt2-gated": GPT2(**TINY, n_kv_heads=1, bias=False, activation="swiglu", tie_embeddings=False),
}


def build(config, seed=0):
    torch.manual_seed(seed)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():  # off the initial values, where sublayers hardly speak
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return decoder


def tokens(*shape, seed=1):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))
