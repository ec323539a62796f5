"""FLOPs per token: worked out by hand for known models, and counted by torch on our decoder."""

import doctest
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting import (
    attention_flops_per_token,
    flops,
    matmul_parameters,
    recompute_flops_per_token,
    training_flops_per_token,
)
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


def mixture(**changes):
    """Mixtral 8x7B, by table 1 of https://arxiv.org/abs/2401.04088."""
    shape = {
        "vocab_size": 32000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "kv_heads": 8, "head_dim": 128,
        "ffn_width": 14336, "activation": "swiglu", "n_experts": 8, "experts_per_token": 2,
    }  # fmt: skip
    return SimpleNamespace(**(shape | changes))


def test_a_mixture_counts_its_active_experts_and_its_router():
    # a block: attention 2 * 4096^2 + 2 * 4096 * 1024, two experts of 3 * 4096 * 14336, a router of 4096 * 8
    block = 41_943_040 + 2 * 176_160_768 + 32_768
    assert matmul_parameters(mixture()) == 32 * block + 131_072_000 == 12_748_587_008
    # with the embedding, the 13 billion active parameters of the paper's abstract
    assert round((12_748_587_008 + 131_072_000) / 1e9) == 13
    # all eight experts: its 47 billion
    assert round((matmul_parameters(mixture(experts_per_token=8)) + 131_072_000) / 1e9) == 47
    assert training_flops_per_token(mixture(), 4096, "full") == 6 * 12_748_587_008 + 6_442_450_944


def test_one_expert_and_no_router_is_the_dense_model():
    dense = mixture(n_experts=None, experts_per_token=None)
    assert matmul_parameters(mixture(n_experts=1, experts_per_token=1)) == matmul_parameters(dense) + 32 * 4096


SMALL = {"vocab_size": 10, "d_model": 4, "n_layers": 3, "n_heads": 2, "kv_heads": 1, "head_dim": 2, "ffn_width": 8}


def test_what_checkpointing_computes_again_by_hand():
    gated, plain = SimpleNamespace(**SMALL, activation="swiglu"), SimpleNamespace(**SMALL, activation="gelu")
    # a block's matrices: q and o 16 each, k and v 8 each, gate, up and down 32 each; two FLOPs a weight, three blocks
    # attention forward, both products over 6 keys: 2 * 2 * 6 * 2 heads * 2 wide = 96, of which a causal token needs 48
    assert recompute_flops_per_token(gated, 6, "full", "none") == 0
    assert recompute_flops_per_token(gated, 6, "full", "full") == 3 * (2 * (16 + 8 + 8 + 16 + 32 + 32) + 96)
    assert recompute_flops_per_token(gated, 6, "causal", "full") == 3 * (2 * (16 + 8 + 8 + 16 + 32 + 32) + 48)
    assert recompute_flops_per_token(plain, 6, "causal", "full") == 3 * (2 * (16 + 8 + 8 + 16 + 32) + 48)
    # every second product is kept, and attention: k, o and a gated MLP's up are not
    assert recompute_flops_per_token(gated, 6, "full", "selective") == 3 * 2 * (8 + 16 + 32)
    assert recompute_flops_per_token(plain, 6, "full", "selective") == 3 * 2 * (8 + 16)


def test_checkpointed_experts_are_refused_and_others_cost_nothing_again():
    assert recompute_flops_per_token(mixture(), 4096, "full", "none") == 0
    with pytest.raises(UsageError, match=r"activation_checkpointing='full': .*experts.* count_flops"):
        recompute_flops_per_token(mixture(), 4096, "full", "full")


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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: training_flops_per_token(Llama(), 4096, "half"), "attention='half': give one of causal, full"),
        (lambda: recompute_flops_per_token(Llama(), 4096, "half", "none"), "attention='half'"),
        (
            lambda: recompute_flops_per_token(Llama(), 4096, "full", "half"),
            "activation_checkpointing='half': give one of none, cheap, selective, full",
        ),
        (lambda: training_flops_per_token(Llama(), 0, "full"), "seq_len=0: give a length of at least 1"),
        *(
            (
                lambda active=active: matmul_parameters(mixture(experts_per_token=active)),
                f"experts_per_token={active}: give a number from 1 to n_experts=8",
            )
            for active in (None, 0, 9)
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(call, said):
    with pytest.raises(UsageError, match=said):
        call()


def test_the_example_in_the_docstring_is_true():
    assert doctest.testmod(flops).failed == 0
