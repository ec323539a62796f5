"""LayerwiseLRDecay: each block's learning rate by its depth, beside other rules."""

import pytest
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import LayerwiseLRDecay, ParamRule, build_optimizer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)


def scales(model, rules):
    optimizer = build_optimizer(model, rules=rules)
    return {name: round(group["lr"] / 3e-4, 6) for group in optimizer.param_groups for name in group["param_names"]}


def test_each_block_learns_by_its_depth():
    rules = [ParamRule(r"^blocks\.1\.0\.bias$", lr_scale=3.0), LayerwiseLRDecay(0.5)]
    assert scales(Model(), rules) == {
        "embed.weight": 0.5**4,
        **{f"blocks.0.{name}": 0.5**3 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **{f"blocks.1.{name}": 0.5**2 for name in ("0.weight", "1.weight", "1.bias")},
        "blocks.1.0.bias": 3.0,
        **{f"blocks.2.{name}": 0.5 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **dict.fromkeys(("norm.weight", "norm.bias", "head.weight", "head.bias"), 1.0),
    }


def test_a_frozen_block_and_one_that_an_earlier_rule_takes_change_nothing_for_the_others():
    model, rules = Model(), [ParamRule(r"^blocks\.1\.", lr_scale=3.0), LayerwiseLRDecay(0.5)]
    whole = scales(model, rules)
    assert {name[:8]: scale for name, scale in whole.items() if name.startswith("blocks")} == {
        "blocks.0": 0.5**3, "blocks.1": 3.0, "blocks.2": 0.5,
    }  # fmt: skip
    model.blocks[0].requires_grad_(False)
    left = scales(model, rules)
    assert left == {name: scale for name, scale in whole.items() if not name.startswith("blocks.0")}
    model.embed.requires_grad_(False)
    del left["embed.weight"]
    assert scales(model, rules) == left


def test_it_is_refused_where_nothing_is_left_for_it():
    with pytest.raises(
        UsageError, match="LayerwiseLRDecay: all parameters of the 3 blocks, and those before them, are"
    ):
        build_optimizer(Model(), rules=[ParamRule("embed|blocks", lr_scale=3.0), LayerwiseLRDecay(0.5)])
    model = Model()
    model.blocks.requires_grad_(False)
    assert scales(model, [LayerwiseLRDecay(0.5)])["embed.weight"] == 0.5**4
    model.embed.requires_grad_(False)
    with pytest.raises(UsageError, match="LayerwiseLRDecay: all parameters of the 3 blocks"):
        build_optimizer(model, rules=[LayerwiseLRDecay(0.5)])


def test_wrong_input():
    with pytest.raises(UsageError, match=r"LayerwiseLRDecay\.decay=1\.5"):
        LayerwiseLRDecay(1.5)
    with pytest.raises(UsageError, match="Linear has no repeated blocks"):
        build_optimizer(nn.Linear(4, 4), rules=[LayerwiseLRDecay()])
