"""The optimizer of a run: its defaults, learning rates, and every refused setting."""

import math

import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import MuonAdamW, MuP, ParamRule, build_optimizer
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


def layers():
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))


def settings(optimizer, key):
    return {name: group.get(key) for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("make", [adamw(), lambda groups: MuonAdamW(groups)])
def test_a_rule_has_betas_and_eps_of_its_own_which_the_step_reads(make):
    rules = [ParamRule(role="embedding", betas=[0.5, 0.25], eps=0.125), ParamRule(role="norm", eps=1e-5)]
    torch.manual_seed(0)
    model = layers()
    optimizer = build_optimizer(model, make, weight_decay=0.0, rules=rules)
    usual = settings(build_optimizer(model, make), "betas")
    assert settings(optimizer, "betas") == {**usual, "0.weight": (0.5, 0.25)}
    eps = settings(optimizer, "eps")
    assert (eps["0.weight"], eps["2.weight"], eps["2.bias"], eps["3.weight"]) == (0.125, 1e-5, 1e-5, 1e-8)
    weight, expected, m, v = model[0].weight, model[0].weight.detach().clone(), 0.0, 0.0
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        m, v = 0.5 * m + 0.5 * weight.grad, 0.25 * v + 0.75 * weight.grad**2
        lr = optimizer.param_groups[-1]["lr"]
        expected -= lr * (m / (1 - 0.5**step)) / ((v / (1 - 0.25**step)).sqrt() + 0.125)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_mup_keeps_the_betas_of_a_rule():
    class Narrow(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

        def base_shapes(self):
            return {name: weight.shape for name, weight in Narrow(4).named_parameters()}

    rules = [ParamRule(r"blocks\.1", betas=(0.5, 0.25))]
    optimizer = build_optimizer(Narrow(8), adamw(betas=(0.9, 0.95)), rules=rules, mup=MuP(4))
    found = settings(optimizer, "betas")
    assert {found["blocks.1.weight"], found["blocks.1.bias"]} == {(0.5, 0.25)}
    assert found["blocks.0.weight"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("make", "rule", "line"),
    [
        (lambda groups: MuonAdamW(groups), ParamRule(r"^1\.", betas=(0.9, 0.99)),
         r"param_rules: betas=\(0.9, 0.99\) of 'muon:decay:\^1\\\\.': Muon has no betas: narrow the rule by a role"),
        (lambda groups: MuonAdamW(groups), ParamRule(role="matrix", eps=1e-6), ".*Muon has no eps"),
        (lambda groups: torch.optim.SGD(groups, lr=0.1), ParamRule("0", eps=1e-6), ".*SGD has no eps"),
        (adamw(betas=(0.9, 0.95)), ParamRule("0", betas=(0.9,)), r".*AdamW has betas=\(0.9, 0.95\)"),
    ],
)  # fmt: skip
def test_betas_and_eps_that_an_optimizer_does_not_know_are_one_line(make, rule, line):
    with pytest.raises(UsageError, match=rf"^{line}[^\n]*$"):
        build_optimizer(layers(), make, rules=[rule])


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
