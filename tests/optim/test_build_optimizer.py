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


def test_one_step_decays_matrices_and_nothing_else():
    net = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(net, adamw(lr=0.5), weight_decay=0.1).step()
    expected = [before[0] * (1 - 0.5 * 0.1), *before[1:]]
    assert all(torch.equal(now, then) for now, then in zip(net.parameters(), expected, strict=True))


def test_rules_scale_the_optimizers_learning_rate():
    optimizer = build_optimizer(model(), adamw(lr=0.5), rules=[ParamRule("1.weight", lr_scale=0.1)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.05]


def test_each_group_has_a_tensor_of_its_own_where_the_learning_rate_is_one():
    optimizer = build_optimizer(model(), adamw(lr=torch.tensor(0.5)), rules=[ParamRule("1.weight", lr_scale=0.1)])
    optimizer.param_groups[0]["lr"].fill_(7)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([7, 0.5, 0.05])


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_no_finite_number_from_0_is_refused(lr):
    with pytest.raises(UsageError, match=rf"^[^\n]*\blr\b[^\n]*{lr}[^\n]*$"):
        build_optimizer(model(), adamw(lr=lr))


def test_what_the_optimizer_refuses_is_one_line():
    with pytest.raises(UsageError, match=r"^optimizer\.betas: [^\n]*$"):
        build_optimizer(model(), adamw(betas=(0.9, 1.5)))


def test_a_decay_given_to_the_optimizer_is_refused_because_it_would_have_no_effect():
    with pytest.raises(UsageError, match=r"weight_decay=0\.2 of AdamW would have no effect"):
        build_optimizer(model(), adamw(weight_decay=0.2))
    build_optimizer(model(), adamw(weight_decay=0.01))  # the class's default: what a recipe without it gives
    build_optimizer(model(), lambda groups: torch.optim.SGD(groups, lr=0.1))


def test_an_optimizer_that_drops_a_parameter_is_refused():
    with pytest.raises(UsageError, match=r"'0\.bias' is in no group"):
        build_optimizer(model(), lambda groups: torch.optim.SGD(groups[:1], lr=0.1))


def test_torchs_muon_alone_names_the_one_that_takes_a_whole_model():
    with pytest.raises(UsageError, match=r"^optimizer: Muon only supports 2D parameters"):
        build_optimizer(nn.Linear(2, 2), torch.optim.Muon)


@pytest.mark.parametrize("needs", [lambda groups: torch.optim.SGD([groups[2]], lr=0.1), torch.optim.Muon])
def test_what_an_optimizer_needs_of_the_parameters_is_no_wrong_setting(needs):
    assert check_settings(needs) is None


def test_a_wrong_setting_is_refused_before_there_is_a_module():
    with pytest.raises(UsageError, match=r"^optimizer: Invalid learning rate: -1\.0$"):
        check_settings(adamw(lr=-1.0))
    assert type(check_settings(adamw(lr=1.0))) is torch.optim.AdamW
