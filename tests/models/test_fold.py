"""folded_state: a decoder with muP's multipliers as plain weights, which any program reads."""

import pytest
import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.models import GPT2, Decoder, Llama, folded_state, generate

SHAPE = {"vocab_size": 61, "n_layers": 2, "max_seq_len": 24}
IDS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))
CASES = {
    "llama": (Llama(**SHAPE, d_model=32, n_heads=2), Llama(**SHAPE, d_model=16, n_heads=2)),
    "qk-norm": (Llama(**SHAPE, d_model=32, n_heads=2, qk_norm=True), Llama(**SHAPE, d_model=16, n_heads=2)),
    "gpt2": (GPT2(**SHAPE, d_model=32, n_heads=2, tie_embeddings=False), GPT2(**SHAPE, d_model=16, n_heads=2)),
}


def scaled(config, base):
    torch.manual_seed(0)
    decoder = Decoder(config, base)
    with torch.no_grad():
        for param in decoder.parameters():  # large enough that attention speaks
            param.add_(torch.randn_like(param), alpha=0.3)
    return decoder


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_plain_decoder_with_the_folded_weights_gives_the_same_logits(case):
    config, base = CASES[case]
    decoder, plain = scaled(config, base), Decoder(config)
    plain.load_state_dict(folded_state(decoder))
    torch.testing.assert_close(plain(IDS), decoder(IDS), rtol=1e-4, atol=1e-5)
    plain.load_state_dict(decoder.state_dict())
    assert not torch.allclose(plain(IDS), decoder(IDS), rtol=1e-2)


def test_a_tied_head_is_refused():
    config = GPT2(**SHAPE, d_model=32, n_heads=2)
    with pytest.raises(
        UsageError, match=r"tie_embeddings=True: muP's multiplier .*: multiply the logits by 0\.5 in the"
    ):
        folded_state(Decoder(config, CASES["gpt2"][1]))


@torch.no_grad()
def test_text_is_written_with_the_multipliers_of_training():
    """The cache of keys and values goes another way through attention."""
    decoder = scaled(*CASES["llama"]).eval()
    row = IDS[:1, :4]
    for token in generate(decoder, row, 8):
        assert token.item() == decoder(row)[0, -1].argmax().item()
        row = torch.cat([row, token.view(1, 1)], dim=1)


@torch.no_grad()
def test_the_largest_attention_logit_and_short_bf16_rows_have_the_scale_too():
    decoder = scaled(*CASES["llama"]).eval()
    block = decoder.blocks[0]
    attention, x = block.attn, torch.randn(1, 8, 32)
    rope = decoder.positions(8, torch.float32, 0)
    largest = attention.max_attention_logit(x, rope, None)
    attention.scale, scale = None, attention.scale
    torch.testing.assert_close(largest, attention.max_attention_logit(x, rope, None) * scale * 4)
    attention.scale = scale
    exact, short = (
        attention(x, rope, None),
        attention.bfloat16()(x.bfloat16(), decoder.positions(8, torch.bfloat16, 0), None),
    )
    torch.testing.assert_close(short.float(), exact, rtol=0.05, atol=0.05)
