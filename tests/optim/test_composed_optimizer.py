"""ComposedOptimizer: several optimizers that a scheduler, a checkpoint and a loop take for one."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import (
    ComposedOptimizer,
    Muon,
    MuonAdamW,
    ParamRule,
    build_optimizer,
    decay_groups,
    skips_on_device,
)
from lightning_tricks.schedules import ScheduleLR, WarmupCosine, WarmupLinear


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2))


def train(model, optimizer, first, last, scheduler=None):
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("through", ["state_dict", "pickle"])
def test_it_resumes_to_the_bit_with_a_schedule_for_each_group(through):
    rules = [
        ParamRule(role="matrix", schedule=WarmupLinear(warmup_steps=2)),
        ParamRule(role="head", decay_schedule=WarmupCosine(warmup_steps=1)),
    ]

    def start():
        model = net()
        optimizer = build_optimizer(model, lambda groups: MuonAdamW(groups, 0.01, momentum_warmup_steps=3), rules=rules)
        own = [None if group["rule"] is None else rules[group["rule"]] for group in optimizer.param_groups]
        curves = [rule and rule.schedule for rule in own], [rule and rule.decay_schedule for rule in own]
        return model, optimizer, ScheduleLR(optimizer, WarmupCosine(warmup_steps=4), 8, *curves)

    whole, optimizer, scheduler = start()
    train(whole, optimizer, 0, 8, scheduler)
    first, optimizer, scheduler = start()
    train(first, optimizer, 0, 4, scheduler)
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    common = WarmupCosine(warmup_steps=4).lr(0.01, 4, 8)
    assert rates["muon:decay:role=matrix"] == (WarmupLinear(warmup_steps=2).lr(0.01, 4, 8), 0.1)
    assert rates["adamw:decay:role=head"] == (common, WarmupCosine(warmup_steps=1).lr(0.1, 4, 8))
    assert rates["adamw:no_decay"] == (common, 0.0)
    if through == "pickle":  # as a process that is started by spawn gets it
        _, optimizer = pickle.loads(pickle.dumps((first, optimizer)))
        assert optimizer.optimizers["muon"].state is optimizer.state
        return
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict(), first.state_dict()))
    resumed, optimizer, scheduler = start()
    resumed.load_state_dict(saved[2])
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    train(resumed, optimizer, 4, 8, scheduler)
    assert same(whole, resumed)


def test_the_recipe_beats_the_checkpoint_in_every_part():
    first = build_optimizer(net(), lambda groups: MuonAdamW(groups, betas=(0.9, 0.99), momentum=0.9))
    second = build_optimizer(net(), lambda groups: MuonAdamW(groups, betas=(0.8, 0.95), momentum=0.95))
    second.load_state_dict(first.state_dict())
    settings = {group["optimizer"]: (group.get("betas"), group.get("momentum")) for group in second.param_groups}
    assert settings == {"muon": (None, 0.95), "adamw": ((0.8, 0.95), None)}

    def several(eps):
        made = {"adamw": lambda groups: torch.optim.AdamW(groups, eps=eps)}
        return build_optimizer(net(), lambda groups: ComposedOptimizer(groups, made, "adamw"))

    resumed = several(1e-6)
    resumed.load_state_dict(several(1e-8).state_dict())
    assert {group["eps"] for group in resumed.param_groups} == {1e-6}


def test_a_closure_runs_once_and_hooks_run_once():
    model, calls = net(), []
    optimizer = MuonAdamW(decay_groups(model))
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure():
        calls.append("closure")
        loss = model(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert calls == ["closure", "hook"]


def test_a_group_that_is_added_later_goes_to_its_optimizer():
    optimizer = MuonAdamW(decay_groups(net()))
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "param_names": ["late"], "optimizer": "adamw", "weight_decay": 0.0})
    late.grad = torch.ones(3)
    optimizer.step()
    assert (late < 1).all()
    assert optimizer.optimizers["adamw"].param_groups[-1] is optimizer.param_groups[-1]


def test_a_step_is_skipped_on_the_device_where_all_of_its_optimizers_can():
    model = net()
    optimizer = MuonAdamW(decay_groups(model), lr=0.1)
    train(model, optimizer, 0, 2)
    before = copy.deepcopy((model, optimizer.state_dict()["state"]))
    optimizer.found_inf = torch.tensor(1.0)
    train(model, optimizer, 2, 3)
    assert same(model, before[0])
    assert str(optimizer.state_dict()["state"]) == str(before[1])
    del optimizer.found_inf
    train(model, optimizer, 2, 3)
    assert not same(model, before[0])
    assert skips_on_device(optimizer)
    assert not skips_on_device(MuonAdamW(decay_groups(net()), fused=False))
    assert not skips_on_device(torch.optim.SGD(net().parameters(), lr=0.1, fused=True))


def test_rules_choose_among_several_by_name():
    made = {"sgd": lambda groups: torch.optim.SGD(groups, lr=0.1), "muon": lambda groups: Muon(groups)}
    rules = [ParamRule(role="matrix", optimizer="muon")]
    optimizer = build_optimizer(net(), lambda groups: ComposedOptimizer(groups, made, default="sgd"), rules=rules)
    assert {name: type(part) for name, part in optimizer.optimizers.items()} == {"sgd": torch.optim.SGD, "muon": Muon}
    names = {name: group["optimizer"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name, part in names.items() if part == "muon"} == {"0.weight", "2.weight"}


SGD = {"sgd": lambda groups: torch.optim.SGD(groups, lr=0.1)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda groups: ComposedOptimizer(groups, SGD), "of group 'decay' has no optimizer: name one of sgd"),
        (lambda groups: ComposedOptimizer(groups, SGD, default="lion"), "has optimizer 'lion', which is not there"),
        (lambda groups: ComposedOptimizer(groups, {**SGD, "muon": Muon}, "sgd"), "'muon' gets no parameter"),
        (lambda groups: ComposedOptimizer([*groups, groups[0]], SGD, "sgd"), "more than one parameter group"),
        (lambda groups: ComposedOptimizer(groups, {"a": lambda g: torch.optim.SGD(g, lr=0.1, weight_decay=0.3)}, "a"),
         "weight_decay=0.3 of SGD would have no effect"),
    ],
)  # fmt: skip
def test_parameters_without_an_optimizer_or_with_two_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        build_optimizer(net(), make)


def test_a_rule_that_names_an_optimizer_wants_one_of_several():
    with pytest.raises(
        UsageError, match="optimizer='muon' of 'decay:role=matrix': AdamW is one optimizer: take MuonAdamW"
    ):
        build_optimizer(net(), rules=[ParamRule(role="matrix", optimizer="muon")])
    with pytest.raises(UsageError, match="optimizer='lion' of decay:role=matrix: MuonAdamW has muon and adamw"):
        build_optimizer(net(), MuonAdamW, rules=[ParamRule(role="matrix", optimizer="lion")])
