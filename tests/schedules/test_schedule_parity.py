"""The curves against transformers' and torch's, with the offset by one stated where they differ."""

import pytest
import torch
from transformers import optimization as hf

from lightning_tricks.schedules import CosineRestarts, WarmupCosine, WarmupInverseSqrt, WarmupLinear, WarmupStableDecay

WARMUP, TOTAL = 7, 40


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def theirs(make, steps=TOTAL, **settings):
    """Factors of a transformers scheduler (a LambdaLR) at steps 0, 1, ..."""
    factor = make(optimizer(), **settings).lr_lambdas[0]
    return [factor(step) for step in range(steps)]


def torchs(make, steps=TOTAL, **settings):
    """Learning rates that a torch scheduler sets at steps 0, 1, ... for a peak of 1."""
    opt = optimizer()
    scheduler, values = make(opt, **settings), []
    for _ in range(steps):
        values.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return values


def ours(schedule, steps=TOTAL, total=TOTAL):
    return [schedule.factor(step, total) for step in range(steps)]


def assert_warmup_is_one_step_ahead(mine, other):
    """theirs starts at 0 / warmup, ours at 1 / warmup: our warmup at step s is theirs at s + 1."""
    assert other[0] == 0
    assert mine[:WARMUP] == pytest.approx(other[1 : WARMUP + 1], abs=1e-14)


LENGTHS = {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL}


@pytest.mark.parametrize(
    ("schedule", "make", "settings"),
    [
        (WarmupCosine(warmup_steps=WARMUP, min_ratio=0.0), hf.get_cosine_schedule_with_warmup, LENGTHS),
        (
            WarmupCosine(warmup_steps=WARMUP, min_ratio=0.1), hf.get_cosine_with_min_lr_schedule_with_warmup,
            {**LENGTHS, "min_lr_rate": 0.1},
        ),
        (WarmupLinear(warmup_steps=WARMUP), hf.get_linear_schedule_with_warmup, LENGTHS),
    ],
)  # fmt: skip
def test_curves_with_an_end_are_transformers_after_a_warmup_one_step_ahead(schedule, make, settings):
    mine, other = ours(schedule), theirs(make, **settings)
    if "min_lr_rate" not in settings:  # with a floor, theirs warms up from it
        assert_warmup_is_one_step_ahead(mine, other)
    assert mine[WARMUP:] == pytest.approx(other[WARMUP:], abs=1e-14)


def test_inverse_sqrt_is_transformers_one_step_ahead_all_along():
    mine = ours(WarmupInverseSqrt(warmup_steps=WARMUP))
    other = theirs(hf.get_inverse_sqrt_schedule, steps=TOTAL + 1, num_warmup_steps=WARMUP)
    assert mine == pytest.approx(other[1:], abs=1e-14)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_stable_decay_is_transformers_wsd_after_the_warmup(shape, floor):
    schedule = WarmupStableDecay(warmup_steps=WARMUP, decay_steps=12, decay_shape=shape, min_ratio=floor)
    settings = {
        "num_warmup_steps": WARMUP,
        "num_decay_steps": 12,
        "num_training_steps": TOTAL,
        "decay_type": shape,
        "min_lr_ratio": floor,
    }
    mine, other = ours(schedule, steps=TOTAL + 5), theirs(hf.get_wsd_schedule, steps=TOTAL + 5, **settings)
    assert mine[WARMUP:] == pytest.approx(other[WARMUP:], abs=1e-14)
    if floor == 0:  # with a floor, theirs warms up from the floor, ours from 0
        assert_warmup_is_one_step_ahead(mine, other)


@pytest.mark.parametrize("mult", [1, 2, 3])
def test_restarts_are_torchs_warm_restarts(mult):
    settings = {"T_0": 5, "T_mult": mult, "eta_min": 0.1}
    other = torchs(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, steps=100, **settings)
    mine = ours(CosineRestarts(cycle_steps=5, cycle_mult=mult, min_ratio=0.1), steps=100, total=None)
    assert mine == pytest.approx(other, abs=1e-14)
