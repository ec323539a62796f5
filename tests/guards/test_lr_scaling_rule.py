"""LRScalingRule: the learning rate of a reference batch, scaled to the batch that the run has."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tricks._errors import UsageError
from lightning_tricks.callbacks import BatchSizeWarmup, LRScalingRule
from lightning_tricks.guards.batch_size import lr_scaling_rule
from lightning_tricks.schedules import ScheduleLR, WarmupLinear


class Model(pl.LightningModule):
    """Two groups; notes the learning rates of each step."""

    def __init__(self, scheduler: str = "ours") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scheduler = torch.nn.Linear(4, 1), scheduler
        self.rates: list[list[float]] = []

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([{"params": [self.net.weight], "lr": 0.1}, {"params": [self.net.bias], "lr": 0.02}])
        if self.scheduler == "none":
            return optimizer
        curve = ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), 6)
        scheduler = curve if self.scheduler == "ours" else torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rows(pl.LightningDataModule):
    """Rows that stand for sequences of 8 tokens."""

    micro_batch_size, seq_len = 3, 8

    def train_dataloader(self):
        return DataLoader(torch.ones(60, 4), batch_size=3)


def fit(module, *callbacks, data=None, ckpt_path=None, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    defaults = {"max_steps": 6, "accumulate_grad_batches": 2, "devices": 1, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=list(callbacks), **quiet, **{**defaults, **options})
    trainer.fit(module, Rows() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def plain(options=None):
    module = Model(**(options or {}))
    fit(module)
    return module.rates


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
    module = Model(scheduler)
    fit(module, LRScalingRule(**options))
    assert module.rates == [[rate * factor for rate in rates] for rates in plain({"scheduler": scheduler})]


def test_a_loader_alone_tells_its_samples(monkeypatch):
    module, said = Model(), []
    monkeypatch.setattr(lr_scaling_rule, "rank_zero_info", said.append)
    fit(module, LRScalingRule(reference_batch_samples=2, rule="linear"), data=DataLoader(torch.ones(40, 4), 4))
    assert module.rates == [[rate * 4 for rate in rates] for rates in plain()]
    assert said == [
        "LRScalingRule: the recipe's lr is for 2 samples a step, a step of this run takes 8: lr x 4 (linear)"
    ]


def test_a_resume_follows_the_recipe_and_not_the_checkpoint(tmp_path):
    for scheduler in ("ours", "none"):
        fit(Model(scheduler), LRScalingRule(12), max_steps=3).save_checkpoint(tmp_path / "three.ckpt")
        resumed = Model(scheduler)
        fit(resumed, LRScalingRule(12, rule="linear"), ckpt_path=tmp_path / "three.ckpt")
        assert resumed.rates == [[rate * 4 for rate in rates] for rates in plain({"scheduler": scheduler})[3:]]


def test_with_a_growing_batch_it_scales_to_the_last_stage_and_both_factors_multiply():
    for scheduler in ("ours", "none"):
        module = Model(scheduler)
        warmup = BatchSizeWarmup({0: 1, 2: 2}, lr_rule="linear")
        fit(module, LRScalingRule(12, rule="linear"), warmup)
        growth = [0.5, 0.5, 1, 1, 1, 1]
        unscaled = plain({"scheduler": scheduler})
        assert module.rates == [
            [rate * (4 * part) for rate in rates] for rates, part in zip(unscaled, growth, strict=True)
        ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "reference_batch_tokens=None, reference_batch_samples=None: give one of the two"),
        ({"reference_batch_tokens": 4, "reference_batch_samples": 2}, "give one of the two"),
        ({"reference_batch_tokens": 0}, "reference_batch_tokens=0: give 1 or more"),
        ({"reference_batch_tokens": 4, "rule": "none"}, "rule='none': give one of linear, sqrt"),
        ({"reference_batch_tokens": 4}, r"neither data module nor loader tells the micro-batch \(seq_len and"),
        ({"reference_batch_samples": 4}, r"neither data module nor loader tells the micro-batch \(micro_batch_size or"),
    ],
)
def test_a_reference_that_cannot_be_is_refused_in_one_line(options, line):
    batches = DataLoader([torch.ones(3, 4)] * 20, batch_size=None)
    with pytest.raises(UsageError, match=f"^LRScalingRule[^\n]*{line}[^\n]*$"):
        fit(Model(), LRScalingRule(**options), data=batches)


def test_a_scheduler_of_torch_is_refused_in_one_line():
    with pytest.raises(UsageError, match=r"^LRScalingRule: StepLR sets the learning rate \(interval step[^\n]*$"):
        fit(Model("torch"), LRScalingRule(12))
