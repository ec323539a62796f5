"""LRMonitor: the learning rate of each step, also where the optimizer holds it in a Tensor."""

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import fit
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import LRMonitor
from lightning_tricks.schedules import ScheduleLR, WarmupLinear


class Net(pl.LightningModule):
    """Its only group learns at a quarter of the optimizer's rate, as `build_optimizer` sets it up."""

    def __init__(self, lr: float | torch.Tensor) -> None:
        super().__init__()
        self.layer, self.peak = nn.Linear(2, 1), lr

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([{"params": [*self.parameters()], "lr_scale": 0.25}], lr=self.peak)
        optimizer.param_groups[0]["lr"] = self.peak * 0.25
        scheduler = ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), total_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["float", "Tensor"])
def test_each_step_has_the_rate_that_it_used_without_the_groups_scale(lr):
    # torchao's optimizers hold the rate in a Tensor, which the schedule fills in place
    run = fit(Net(lr), LRMonitor(), data=DataLoader(torch.ones(6, 2)), max_steps=6, log_every_n_steps=3)
    assert run.of("train/lr") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


class FindsItsOwnRate(torch.optim.SGD):
    """As transformers' Adafactor by default: the group's lr is None, and the step computes one."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["lr"] = None

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for param in self.param_groups[0]["params"]:
            param -= 0.1 * param.grad


@pytest.mark.parametrize("optimizer", [lambda params: None, FindsItsOwnRate], ids=["no optimizer", "a rate of its own"])
def test_a_module_without_a_learning_rate_trains_on(optimizer):
    class Without(Net):
        def configure_optimizers(self):
            return optimizer(self.parameters())

    run = fit(Without(1.0), LRMonitor(), data=DataLoader(torch.ones(3, 2)), max_steps=3, log_every_n_steps=1)
    assert run.of("train/lr") == []
