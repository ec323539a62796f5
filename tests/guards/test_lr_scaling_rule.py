"""LRScalingRule: the learning rate of a reference batch, scaled to the batch that the run has."""

import lightning.pytorch as pl
import pytest
import torch
from harness import runs
from harness.models import Small
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import BatchSizeWarmup, LRScalingRule
from lightning_tricks.guards import lr_scaling_rule
from lightning_tricks.schedules import ScheduleLR, WarmupLinear

SCHEDULES = {
    "ours": lambda optimizer: ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), 6),
    "torch": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "none": None,
}


def model(schedule="ours"):
    """Two groups."""

    def sgd(parameters):
        return torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.02), strict=True)])

    return Small(optimizer=sgd, schedule=SCHEDULES[schedule])


class Rows(pl.LightningDataModule):
    """Rows that stand for sequences of 8 tokens."""

    micro_batch_size, seq_len = 3, 8

    def train_dataloader(self):
        return DataLoader(torch.ones(60, 4), batch_size=3)


def fit(module, *callbacks, data=None, **options):
    defaults = {"max_steps": 6, "accumulate_grad_batches": 2, "logger": False}
    return runs.fit(module, *callbacks, data=Rows() if data is None else data, **{**defaults, **options}).model.lrs


def scaled(schedule, factors):
    """What a run without the rule has, times the factor of each step."""
    return [[rate * factor for rate in rates] for rates, factor in zip(fit(model(schedule)), factors, strict=True)]


# 2 micro-batches of 3 rows of 8 tokens: 48 tokens, 6 samples
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"reference_batch_tokens": 12}, 2.0),
        ({"reference_batch_tokens": 12, "rule": "linear"}, 4.0),
        ({"reference_batch_samples": 24}, 0.5),
        ({"reference_batch_samples": 24, "rule": "linear"}, 0.25),
        ({"reference_batch_tokens": 48}, 1.0),
    ],
)
@pytest.mark.parametrize("scheduler", ["ours", "none"])
def test_the_factor_multiplies_every_group_at_every_step(options, factor, scheduler):
    assert fit(model(scheduler), LRScalingRule(**options)) == scaled(scheduler, [factor] * 6)


def test_a_loader_alone_tells_its_samples(monkeypatch):
    said = []
    monkeypatch.setattr(lr_scaling_rule, "rank_zero_info", said.append)
    rule, data = LRScalingRule(reference_batch_samples=2, rule="linear"), DataLoader(torch.ones(40, 4), 4)
    assert fit(model(), rule, data=data) == scaled("ours", [4] * 6)
    assert said == [
        "LRScalingRule: the recipe's lr is for 2 samples a step, a step of this run takes 8: lr x 4 (linear)"
    ]


@pytest.mark.parametrize("scheduler", ["ours", "none"])
def test_a_resume_follows_the_recipe_and_not_the_checkpoint(tmp_path, scheduler):
    runs.fit(
        model(scheduler), LRScalingRule(12), data=Rows(), max_steps=3, accumulate_grad_batches=2
    ).trainer.save_checkpoint(tmp_path / "three.ckpt")
    resumed = fit(model(scheduler), LRScalingRule(12, rule="linear"), ckpt_path=tmp_path / "three.ckpt")
    assert resumed == scaled(scheduler, [4] * 6)[3:]


@pytest.mark.parametrize("scheduler", ["ours", "none"])
def test_with_a_growing_batch_it_scales_to_the_last_stage_and_both_factors_multiply(scheduler):
    warmup = BatchSizeWarmup({0: 1, 2: 2}, lr_rule="linear")
    found = fit(model(scheduler), LRScalingRule(12, rule="linear"), warmup)
    assert found == scaled(scheduler, [2, 2, 4, 4, 4, 4])


ALONE = DataLoader([torch.ones(3, 4)] * 20, batch_size=None)
GROWS = pl.callbacks.GradientAccumulationScheduler({0: 4})
SAYS_NOT = r"neither data module nor loader tells the micro-batch"


@pytest.mark.parametrize(
    ("schedule", "callbacks", "options", "line"),
    [
        ("ours", [LRScalingRule(4)], {"data": ALONE}, rf"{SAYS_NOT} \(seq_len and"),
        ("ours", [LRScalingRule(None, 4)], {"data": ALONE}, rf"{SAYS_NOT} \(micro_batch_size or"),
        ("ours", [LRScalingRule(12), GROWS], {"accumulate_grad_batches": 1}, "with GradientAccumulationScheduler the "),
        ("torch", [LRScalingRule(12)], {}, r"StepLR sets the learning rate \(interval step"),
    ],
)
def test_what_it_cannot_scale_is_refused_in_one_line(schedule, callbacks, options, line):
    with pytest.raises(UsageError, match=f"^LRScalingRule[^\n]*{line}[^\n]*$"):
        fit(model(schedule), *callbacks, **options)
