"""What activation checkpointing keeps and computes again, by hand, and the modes that meet a budget."""

from types import SimpleNamespace
from typing import get_args

import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.recompute import (
    Mode,
    check_checkpointing,
    costs_of_block,
    modes_of_blocks,
    recompute_flops_per_token,
)
from lightning_tricks.models import GPT2, Llama

SMALL = {"vocab_size": 10, "d_model": 4, "n_layers": 3, "n_heads": 2, "kv_heads": 1, "head_dim": 2, "ffn_width": 8}
CONFIGS = {
    "Llama-2-7B": Llama(),
    "wide, short rows": Llama(d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28672, max_seq_len=2048),
    "GPT-2": GPT2(),
    "experts": Llama(
        n_layers=24, n_experts=8, experts_per_token=2, d_expert=2048, n_shared_experts=1, dense_layers=3, n_kv_heads=8
    ),
}
SHARES = [percent / 100 for percent in range(101)]


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
    # fused: of each block q, k and v are kept, and o, gate and up are not
    assert recompute_flops_per_token(gated, 6, "full", "selective", True) == 3 * 2 * (16 + 32 + 32)
    assert recompute_flops_per_token(plain, 6, "full", "selective", True) == 3 * 2 * (16 + 32)
    # a budget is the sum over its blocks, the mode of which is chosen for causal attention
    modes = modes_of_blocks(gated, {"budget": 0.3}, 6)
    assert len(set(modes)) == 2
    whole = sum(recompute_flops_per_token(gated, 6, "full", mode) for mode in modes)
    assert 3 * recompute_flops_per_token(gated, 6, "full", {"budget": 0.3}) == whole


def share(config, modes):
    """The part that stays of what `none` keeps beyond `full`."""
    dense = config.n_layers if config.n_experts is None else config.dense_layers

    def kept(modes):
        return sum(costs_of_block(config, number >= dense, 0)[mode][0] for number, mode in enumerate(modes))

    least, most = (kept([mode] * config.n_layers) for mode in ("full", "none"))
    return (kept(modes) - least) / (most - least)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_larger_budget_keeps_more_but_at_most_its_share_and_computes_less_again(name):
    config = CONFIGS[name]
    config = SimpleNamespace(**{"n_experts": None, **{one: getattr(config, one) for one in dir(config)
                                                      if not one.startswith("_")}})  # fmt: skip
    modes = [modes_of_blocks(config, {"budget": budget}, config.max_seq_len) for budget in SHARES]
    kept = [share(config, own) for own in modes]
    again = [recompute_flops_per_token(config, config.max_seq_len, "causal", {"budget": budget}) for budget in SHARES]
    assert kept == sorted(kept)
    assert again == sorted(again, reverse=True)
    assert set(modes[0]), set(modes[-1]) == ({"full"}, {"none"})
    block = 1.2 / config.n_layers  # what one step of a block saves at most
    assert all(budget - block < own <= budget + 1e-9 for budget, own in zip(SHARES, kept, strict=True))
    # no mode of all blocks is better than the budget that keeps as much, up to the last block's step
    for mode in get_args(Mode):
        alike = [mode] * config.n_layers
        budget = {"budget": min(1.0, share(config, alike) + block)}
        flops = recompute_flops_per_token(config, config.max_seq_len, "causal", budget)
        assert flops <= recompute_flops_per_token(config, config.max_seq_len, "causal", mode)


@pytest.mark.parametrize("budget", [0.2, 0.35, 0.5, 0.85])
@pytest.mark.parametrize("name", ["Llama-2-7B", "GPT-2"])
def test_each_pipeline_stage_keeps_its_share(name, budget):
    config = CONFIGS[name]
    modes = modes_of_blocks(config, {"budget": budget}, config.max_seq_len)
    assert len(set(modes)) == 2
    each = config.n_layers // 4
    for mode in set(modes):
        counts = [modes[begin : begin + each].count(mode) for begin in range(0, config.n_layers, each)]
        assert max(counts) - min(counts) <= 1


def test_what_blocks_of_7b_keep_by_hand():
    config, d, hidden = CONFIGS["Llama-2-7B"], 4096, 11008
    scales = 2 * 32  # the fp32 number of each head
    kept = {mode: numbers for mode, (numbers, _) in costs_of_block(config, False, 0).items()}
    assert kept == {
        "full": d,
        "selective": 4 * d + hidden + scales,  # input, q, v, attention; gate
        "cheap": 6 * d + 2 * hidden + scales,  # k, o; up
        # input, stream, two norms, q, k, v, attention; gate, up, their product
        "none": 8 * d + 3 * hidden + scales,
    }


@pytest.mark.parametrize(
    "given",
    ["half", "", 0.5, {"budget": 1.5}, {"budget": -0.1}, {"budget": "half"}, {"budget": True}, {"budget": float("nan")},
     {}, {"budget": 0.5, "mode": "full"}, {"share": 0.5}],
)  # fmt: skip
def test_another_dict_than_a_budget_is_refused(given):
    words = r"give one of none, cheap, selective, full, or \{budget: SHARE\}, the share of .* from 0 "
    with pytest.raises(UsageError, match=rf"^activation_checkpointing=.*: {words}"):
        check_checkpointing(given)


def test_no_mode_is_none_and_a_budget_is_a_float():
    assert check_checkpointing(None) == "none"
    assert check_checkpointing({"budget": 1}) == {"budget": 1.0}
