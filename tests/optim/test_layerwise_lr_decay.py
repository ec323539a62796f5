"""LayerwiseLRDecay: each block's learning rate by its depth, beside other rules."""

import pytest
from torch import nn

from lightning_tricks._errors import UsageError
from lightning_tricks.optim import LayerwiseLRDecay, ParamRule, build_optimizer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)


def test_each_block_learns_by_its_depth():
    rules = [ParamRule(r"^blocks\.1\.0\.bias$", lr_scale=3.0), LayerwiseLRDecay(0.5)]
    optimizer = build_optimizer(Model(), rules=rules)
    rate = {name: group["lr"] / 3e-4 for group in optimizer.param_groups for name in group["param_names"]}
    assert {name: round(scale, 6) for name, scale in rate.items()} == {
        "embed.weight": 0.5**4,
        **{f"blocks.0.{name}": 0.5**3 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **{f"blocks.1.{name}": 0.5**2 for name in ("0.weight", "1.weight", "1.bias")},
        "blocks.1.0.bias": 3.0,
        **{f"blocks.2.{name}": 0.5 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **dict.fromkeys(("norm.weight", "norm.bias", "head.weight", "head.bias"), 1.0),
    }


def test_wrong_input():
    with pytest.raises(UsageError, match=r"LayerwiseLRDecay\.decay=1\.5"):
        LayerwiseLRDecay(1.5)
    with pytest.raises(UsageError, match="Linear has no repeated blocks"):
        build_optimizer(nn.Linear(4, 4), rules=[LayerwiseLRDecay()])
