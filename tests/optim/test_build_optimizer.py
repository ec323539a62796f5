"""The optimizer of a run: its defaults, learning rates, and every refused setting."""

import math

import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import ParamRule, build_optimizer
from lightning_tricks.optim.build_optimizer import check_settings


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def adamw(**settings):
    return lambda groups: torch.optim.AdamW(groups, **settings)


def test_the_default_is_adamw_with_the_settings_that_its_docstring_gives():
    optimizer = build_optimizer(model())
    assert type(optimizer) is torch.optim.AdamW
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.9, 0.95), 1e-8)
        assert group["weight_decay"] == decay


def test_each_group_has_a_tensor_of_its_own_where_the_learning_rate_is_one():
    optimizer = build_optimizer(model(), adamw(lr=torch.tensor(0.5)), rules=[ParamRule("1.weight", lr_scale=0.1)])
    optimizer.param_groups[0]["lr"].fill_(7)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([7, 0.5, 0.05])


def test_a_decay_of_the_class_itself_is_none_that_a_recipe_gives():
    build_optimizer(model(), adamw(weight_decay=0.01))
    build_optimizer(model(), lambda groups: torch.optim.SGD(groups, lr=0.1))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (adamw(lr=-1.0), "optimizer: Invalid learning rate: -1.0"),
        (adamw(lr=math.nan), "optimizer: Invalid learning rate: nan"),
        (adamw(lr=math.inf), "lr=inf of the optimizer"),
        (adamw(betas=(0.9, 1.5)), "optimizer: Invalid beta"),
        (adamw(weight_decay=0.2), "weight_decay=0.2 of AdamW would have no effect"),
        (lambda groups: torch.optim.SGD(groups[:1], lr=0.1), "parameter '0.bias' is in no group"),
        (
            lambda groups: (adamw()(groups), None),
            "optimizer: its function returns a tuple: let it return the optimizer",
        ),
        (torch.optim.Muon, "optimizer: Muon only supports 2D parameters"),
    ],
)
def test_what_cannot_be_is_one_line(optimizer, words):
    with pytest.raises(UsageError, match=rf"^{words}[^\n]*$"):
        build_optimizer(model(), optimizer)


@pytest.mark.parametrize("needs", [lambda groups: torch.optim.SGD([groups[2]], lr=0.1), torch.optim.Muon])
def test_what_an_optimizer_needs_of_the_parameters_is_no_wrong_setting(needs):
    assert check_settings(needs) is None


def test_a_wrong_setting_is_refused_before_there_is_a_module():
    with pytest.raises(UsageError, match=r"^optimizer: Invalid learning rate: -1\.0$"):
        check_settings(adamw(lr=-1.0))
    assert type(check_settings(adamw(lr=1.0))) is torch.optim.AdamW
