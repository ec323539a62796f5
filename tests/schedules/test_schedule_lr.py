"""The torch scheduler around a curve: right at every step, and the recipe beats the checkpoint."""

import copy

import pytest
import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.schedules import ScheduleLR, WarmupConstant, WarmupCosine, WarmupLinear


def make(lr=1.0, schedule=None, total=10, other_lr=0.5):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": other_lr}], lr=lr)
    return optimizer, ScheduleLR(optimizer, schedule or WarmupLinear(warmup_steps=2), total)


def train(optimizer, scheduler, steps):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()


def lrs(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_each_group_follows_the_curve_from_its_own_learning_rate():
    optimizer, scheduler = make()
    seen = []
    for _ in range(12):
        seen.append(lrs(optimizer))
        assert scheduler.get_last_lr() == seen[-1]
        train(optimizer, scheduler, 1)
    curve = [WarmupLinear(warmup_steps=2).factor(step, 10) for step in range(12)]
    assert seen == [[factor, 0.5 * factor] for factor in curve]


@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
def test_a_resume_follows_the_recipe_in_lr_length_and_shape(order):
    optimizer, scheduler = make()
    train(optimizer, scheduler, 5)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    schedule = WarmupCosine(warmup_steps=1)
    resumed, follower = make(lr=0.2, schedule=schedule, total=50, other_lr=0.3)
    loads = [lambda: resumed.load_state_dict(saved[0]), lambda: follower.load_state_dict(saved[1])]
    for load in loads if order == "optimizer first" else loads[::-1]:
        load()
    assert lrs(resumed) == [schedule.lr(0.2, 5, 50), schedule.lr(0.3, 5, 50)] == follower.get_last_lr()
    train(resumed, follower, 1)
    assert lrs(resumed) == [schedule.lr(0.2, 6, 50), schedule.lr(0.3, 6, 50)]


def test_another_length_in_mid_run_holds_from_the_current_step_on():
    optimizer, scheduler = make()
    schedule = scheduler.schedule
    train(optimizer, scheduler, 6)
    scheduler.set_total_steps(70)
    assert lrs(optimizer) == [schedule.lr(1.0, 6, 70), schedule.lr(0.5, 6, 70)] == scheduler.get_last_lr()
    train(optimizer, scheduler, 1)
    assert lrs(optimizer) == [schedule.lr(1.0, 7, 70), schedule.lr(0.5, 7, 70)]
    with pytest.raises(UsageError, match="warmup_steps"):
        scheduler.set_total_steps(1)
    assert scheduler.total_steps == 70


def test_a_load_leaves_no_old_learning_rate_for_a_later_scheduler():
    optimizer, scheduler = make()
    train(optimizer, scheduler, 5)
    resumed, _ = make(lr=0.2)
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["initial_lr"] for group in resumed.param_groups] == [0.2, 0.5]


def test_the_step_of_another_torch_scheduler_is_taken_over():
    optimizer, _ = make(lr=9.0)
    stock = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.123)
    train(optimizer, stock, 4)
    resumed, follower = make()
    follower.load_state_dict(stock.state_dict())
    assert lrs(resumed) == [WarmupLinear(warmup_steps=2).factor(4, 10) * peak for peak in (1.0, 0.5)]
    assert follower.base_lrs == [1.0, 0.5]


def test_a_tensor_learning_rate_is_filled_in_place():
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)
    scheduler = ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), 10)
    held = optimizer.param_groups[0]["lr"]
    train(optimizer, scheduler, 3)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.5 * 7 / 8)
    scheduler.load_state_dict({"last_epoch": 6})
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.5 * 4 / 8)
    assert scheduler.get_last_lr()[0] is not held


@pytest.mark.parametrize("tensor_saved", [True, False])
def test_a_resume_keeps_the_recipes_kind_of_learning_rate(tensor_saved):
    def build(tensor):
        lr = torch.tensor(0.5) if tensor else 0.5
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)
        return optimizer, ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), 10)

    saved, resumed = build(tensor_saved)[0], build(not tensor_saved)[0]
    resumed.load_state_dict(saved.state_dict())
    lr = resumed.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor) is not tensor_saved
    assert float(lr) == 0.25


def test_a_length_that_follows_is_set_before_the_first_step_and_after_a_state_is_loaded():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), length_follows=True)
    assert optimizer.param_groups[0]["lr"] == 1.0
    scheduler.load_state_dict({"last_epoch": 5})
    with pytest.raises(UsageError, match=r"max_steps \(now None\)"):
        scheduler.set_total_steps(None)
    scheduler.set_total_steps(10)
    assert optimizer.param_groups[0]["lr"] == 0.625
    assert scheduler.get_last_lr() == [0.625]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_length_that_follows_holds_for_the_curves_of_groups_and_their_decays():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.5} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    linear = WarmupLinear(warmup_steps=0)
    curves = [None, linear], [linear, None]
    scheduler = ScheduleLR(optimizer, WarmupConstant(warmup_steps=0), None, *curves, length_follows=True)
    scheduler.load_state_dict({"last_epoch": 5})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]
    scheduler.set_total_steps(10)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1.0, 0.25), (0.5, 0.5)]
