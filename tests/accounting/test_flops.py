"""FLOPs per token: worked out by hand for known models, and counted by torch on our decoder."""

import doctest
from types import SimpleNamespace

import pytest

from lightning_tricks.accounting import (
    flops,
    gpus,
    matmul_parameters,
    training_flops_per_token,
)
from lightning_tricks.models import GPT2, Llama

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


@pytest.mark.parametrize("module", [flops, gpus])
def test_the_examples_in_the_docstrings_are_true(module):
    assert doctest.testmod(module).failed == 0
