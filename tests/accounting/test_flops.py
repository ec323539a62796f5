"""FLOPs per token: worked out by hand for known models, and counted by torch on our decoder."""

import doctest
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks._errors import UsageError
from lightning_tricks.accounting import attention_flops_per_token, flops, matmul_parameters, training_flops_per_token
from lightning_tricks.models import GPT2, Decoder, Llama

LLAMA_3_8B = Llama(vocab_size=128256, n_kv_heads=8, d_ff=14336, max_seq_len=8192)


def test_llama_2_7b_at_4096_tokens():
    # a block: 4 * 4096^2 + 3 * 4096 * 11008 = 202,375,168; 32 of them and a head of 32000 * 4096
    assert matmul_parameters(Llama()) == 32 * 202_375_168 + 131_072_000 == 6_607_077_376
    # 12 * 32 * 4096 * 4096 = 6,442,450,944
    assert training_flops_per_token(Llama(), 4096, "full") == 6 * 6_607_077_376 + 6_442_450_944 == 46_084_915_200
    assert training_flops_per_token(Llama(), 4096, "causal") == 6 * 6_607_077_376 + 3_221_225_472 == 42_863_689_728


def test_llama_3_8b_at_4096_tokens():
    # a block: 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 = 218,103,808; a head of 128256 * 4096
    assert matmul_parameters(LLAMA_3_8B) == 32 * 218_103_808 + 525_336_576 == 7_504_658_432
    assert round(training_flops_per_token(LLAMA_3_8B, 4096, "full") / 1e9, 2) == 51.47
    assert round(training_flops_per_token(LLAMA_3_8B, 4096, "causal") / 1e9, 2) == 48.25


def test_gpt2_124m_counts_its_tied_head_and_not_its_positions():
    # a block: 12 * 768^2 = 7,077,888; a head of 50257 * 768
    assert matmul_parameters(GPT2()) == 12 * 7_077_888 + 38_597_376 == 123_532_032
    assert training_flops_per_token(GPT2(), 1024, "full") == 6 * 123_532_032 + 113_246_208 == 854_438_400
    assert training_flops_per_token(GPT2(), 1024, "causal") == 6 * 123_532_032 + 56_623_104 == 797_815_296


def test_tying_the_head_changes_nothing():
    assert matmul_parameters(GPT2(tie_embeddings=False)) == matmul_parameters(GPT2())


@pytest.mark.parametrize(
    "config",
    [
        Llama(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
        Llama(vocab_size=96, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=64, qk_norm=True),
        GPT2(vocab_size=96, d_model=32, n_layers=2, n_heads=2, max_seq_len=64),
        GPT2(vocab_size=96, d_model=32, n_layers=1, n_heads=2, max_seq_len=64, activation="swiglu"),
    ],
    ids=["llama", "grouped", "gpt2", "gated_gpt2"],
)
def test_torch_counts_the_same_on_our_decoder(config):
    # In bf16 on a CPU attention is two plain products, which FlopCounterMode counts in full, masked or not. It does
    # not know torch's fused CPU kernel (fp32) and counts nothing for it; for the CUDA kernels it adds the scores that
    # the backward pass computes again, 14 n_layers n_heads head_dim T instead of 12.
    tokens = torch.randint(0, config.vocab_size, (2, 64))
    decoder = Decoder(config).bfloat16()
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, labels=tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert counted == pytest.approx(training_flops_per_token(config, 64, "full"), rel=0.01)
    assert attention_flops_per_token(config, 64, "full") > 0.1 * counted  # so that attention is seen to 1 %


@given(
    shape=st.builds(
        SimpleNamespace,
        vocab_size=st.integers(1, 300_000),
        d_model=st.integers(1, 20_000),
        n_layers=st.integers(1, 200),
        n_heads=st.integers(1, 128),
        kv_heads=st.integers(1, 128),
        head_dim=st.integers(1, 256),
        ffn_width=st.integers(1, 80_000),
        activation=st.sampled_from(["swiglu", "gelu", "relu2"]),
    ),
    seq_len=st.integers(1, 1_000_000),
)
@settings(max_examples=100, deadline=None)
def test_full_counts_attention_twice_and_the_rest_alike(shape, seq_len):
    full, causal = (training_flops_per_token(shape, seq_len, kind) for kind in ("full", "causal"))
    without = 6 * matmul_parameters(shape)
    assert full - without == 2 * (causal - without) > 0
    assert training_flops_per_token(shape, 2 * seq_len, "causal") == full


def test_an_unknown_definition_is_refused():
    with pytest.raises(UsageError, match="attention='half': give one of causal, full"):
        training_flops_per_token(Llama(), 4096, "half")


def test_a_row_without_tokens_is_refused():
    with pytest.raises(UsageError, match="seq_len=0: give a length of at least 1"):
        training_flops_per_token(Llama(), 0, "full")


def test_the_example_in_the_docstring_is_true():
    assert doctest.testmod(flops).failed == 0
