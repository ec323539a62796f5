"""Resume: state goes to the right parameters or not at all, and the recipe's settings beat the checkpoint's."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import ParamRule, build_optimizer


class Net(nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(2, 2))


def trained(net, factory=None, **settings):
    torch.manual_seed(0)
    optimizer = build_optimizer(net, factory, **settings)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    return optimizer


def adamw(**settings):
    return lambda groups: torch.optim.AdamW(groups, **settings)


def moments(optimizer):
    return [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]


def test_state_comes_back_and_settings_are_the_recipes():
    saved = trained(Net("a", "b"), adamw(lr=0.1, betas=(0.8, 0.9), eps=1e-3), weight_decay=0.3)
    resumed = build_optimizer(Net("a", "b"), adamw(lr=0.2, betas=(0.7, 0.6), eps=1e-4), weight_decay=0.05)
    resumed.load_state_dict(saved.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(moments(saved), moments(resumed), strict=True))
    for group, decay in zip(resumed.param_groups, (0.05, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (0.2, (0.7, 0.6), 1e-4)
        assert group["weight_decay"] == decay


def test_betas_and_eps_of_a_rule_are_the_recipes_too():
    saved, resumed = (
        trained(Net("a", "b"), adamw(lr=0.1), rules=[ParamRule("^b", betas=betas, eps=eps)])
        for betas, eps in (((0.8, 0.9), 1e-3), ((0.7, 0.6), 1e-4))
    )
    resumed.load_state_dict(saved.state_dict())
    found = {group["name"]: (group["betas"], group["eps"]) for group in resumed.param_groups}
    assert found["decay"] == found["no_decay"] == ((0.9, 0.999), 1e-8)
    assert found["decay:^b"] == found["no_decay:^b"] == ((0.7, 0.6), 1e-4)


def test_a_scheduler_made_after_the_load_starts_from_the_recipes_learning_rate():
    saved = trained(Net("a"), adamw(lr=0.1))
    torch.optim.lr_scheduler.LambdaLR(saved, lambda step: 1.0)  # writes initial_lr into the groups
    resumed = build_optimizer(Net("a"), adamw(lr=0.2))
    resumed.load_state_dict(saved.state_dict())
    assert torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 1.0).base_lrs == [0.2, 0.2]


def test_a_resume_may_turn_fused_on_and_train_on():
    saved = trained(Net("a"), adamw(lr=0.1))
    net = Net("a")
    resumed = build_optimizer(net, adamw(lr=0.1, fused=True))
    resumed.load_state_dict(saved.state_dict())
    assert all(group["fused"] for group in resumed.param_groups)
    assert all(torch.is_tensor(state["step"]) for state in resumed.state.values())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    resumed.step()
    assert [state["step"].item() for state in resumed.state.values()] == [2.0, 2.0]


def test_what_an_optimizer_counts_in_its_groups_comes_from_the_checkpoint():
    class Counting(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["k"] = 0

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["k"] += 1

    saved = trained(Net("a"), lambda groups: Counting(groups, lr=0.1))
    resumed = build_optimizer(Net("a"), lambda groups: Counting(groups, lr=0.2))
    resumed.load_state_dict(saved.state_dict())
    assert [(group["k"], group["lr"]) for group in resumed.param_groups] == [(1, 0.2), (1, 0.2)]


def with_another_group(lr):
    late = nn.Linear(2, 2)
    optimizer = trained(Net("a"), adamw(lr=lr))
    optimizer.add_param_group({"params": [("late.weight", late.weight), ("late.bias", late.bias)], "lr": lr / 10})
    for parameter in late.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_group_that_was_added_later_keeps_its_settings_too():
    saved, resumed = with_another_group(0.1), with_another_group(0.2)
    torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.5)  # in mid-schedule, the lr is not the recipe's
    for _ in range(2):
        resumed.load_state_dict(saved.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(moments(saved), moments(resumed), strict=True))
        assert [group["lr"] for group in resumed.param_groups] == pytest.approx([0.2, 0.2, 0.02])
    with pytest.raises(UsageError, match=r"has no more parameter where this model has 'late\.weight'"):
        resumed.load_state_dict(trained(Net("a")).state_dict())


def test_a_later_load_is_not_led_astray_by_an_earlier_one():
    state = trained(Net("a"), adamw(lr=0.1)).state_dict()
    resumed = build_optimizer(Net("a"), adamw(lr=torch.tensor(0.2)))
    for _ in range(3):
        resumed.param_groups[0]["lr"].fill_(9.0)  # as a scheduler does, in place
        resumed.load_state_dict(state)
        assert float(resumed.param_groups[0]["lr"]) == pytest.approx(0.2)


def three(exempt):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
    layers[1].weight._no_weight_decay = exempt
    return layers


def stock(net):
    return torch.optim.AdamW(net.parameters())


@pytest.mark.parametrize(
    ("saved", "own", "words"),
    [
        (lambda: trained(Net("a", "b")), Net("b", "a"), r"'a\.weight' \(group 'decay'\) .* 'b\.weight' \("),
        (lambda: trained(Net("a", "b")), Net("a"), r"'b\.weight' \(group 'decay'\) where this model has 'a\.bias'"),
        (lambda: trained(Net("a")), Net("a", "b"), r"'a\.bias' .* where this model has 'b\.weight'"),
        (lambda: trained(three(False)), three(True), r"'1\.weight' .* '1\.weight' \(group 'no_decay'\)"),
        (lambda: stock(Net("a")), Net("a"), "does not name its parameters"),
    ],
)
def test_state_of_other_parameters_is_refused_naming_the_first_difference(saved, own, words):
    resumed = build_optimizer(own)
    with pytest.raises(UsageError, match=rf"^[^\n]*{words}[^\n]*$"):
        resumed.load_state_dict(saved().state_dict())
    assert not resumed.state


def test_a_state_dict_keyed_by_name_loads_into_another_order_and_keeps_the_recipe():
    net, other = Net("a", "b"), Net("b", "a")
    state = get_optimizer_state_dict(net, trained(net, adamw(lr=0.1)))
    resumed = build_optimizer(other, adamw(lr=0.2), weight_decay=0.05)
    set_optimizer_state_dict(other, resumed, optim_state_dict=state)
    assert resumed.param_groups[0]["param_names"] == ["b.weight", "a.weight"]
    assert [group["lr"] for group in resumed.param_groups] == [0.2, 0.2]
    assert resumed.param_groups[0]["weight_decay"] == 0.05
    by_name = dict(zip(["a.weight", "b.weight"], [0.1 * 1.0, 0.1 * 3.0], strict=True))  # gradients 1 and 3, 1 - beta1
    for name, parameter in [("b.weight", other.b.weight), ("a.weight", other.a.weight)]:
        assert resumed.state[parameter]["exp_avg"].mean().item() == pytest.approx(by_name[name])
