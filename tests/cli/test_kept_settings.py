"""A resume of a module with optimizers of its own names the settings that come from the checkpoint."""

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from lightning_tricks.cli import RecipeCLI


class Foreign(pl.LightningModule):
    """An optimizer, and a scheduler if `length` is given, as any project has them."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, length: int | None = None):
        super().__init__()
        self.layer, self.lr, self.momentum, self.length = torch.nn.Linear(2, 1), lr, momentum, length

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        if self.length is None:
            return optimizer
        schedule = self.schedule(optimizer, self.length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def schedule(self, optimizer, length):
        return CosineAnnealingLR(optimizer, T_max=length)


class Sequence(Foreign):
    """A warmup of one step, then a cosine."""

    def schedule(self, optimizer, length):
        parts = [LinearLR(optimizer, total_iters=1), CosineAnnealingLR(optimizer, T_max=length)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


class Milestones(Foreign):
    def schedule(self, optimizer, length):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, length])


class Cycle(Foreign):
    """It moves the momentum too."""

    def schedule(self, optimizer, length):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=length)


class Validated(Foreign):
    """The same, with validation."""

    val_dataloader = Foreign.train_dataloader

    def validation_step(self, batch, batch_idx):
        pass


def fit(*options, model="Foreign"):
    return RecipeCLI(
        args=["fit", f"--model={__name__}.{model}", "--trainer.accelerator=cpu", "--trainer.logger=false",
              "--trainer.enable_progress_bar=false", *options]
    ).trainer  # fmt: skip


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ([], [], None),
        ([], ["--model.lr=0.05"], "SGD.lr 0.1 (0.05)"),
        ([], ["--model.lr=0.05", "--model.momentum=0.5"], "SGD.lr 0.1 (0.05), SGD.momentum 0.9 (0.5)"),
        (["--model.length=4"], ["--model.length=4"], None),  # the schedule alone has moved the lr
        (["--model.length=4"], ["--model.length=8"], "CosineAnnealingLR.T_max 4 (8)"),
        (["--model.length=4"], ["--model.length=4", "--model.lr=0.2"], "SGD.lr 0.1 (0.2)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_resume_names_the_settings_that_are_the_checkpoint_s(tmp_path, monkeypatch, caplog, first, then, kept):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="lightning.pytorch")
    path = "checkpoints/epoch=0-step=2.ckpt"
    fit("--trainer.max_steps=2", *first)
    trainer = fit("--trainer.max_steps=3", f"--ckpt_path={path}", *then)
    said = [line for record in caplog.records if "settings of the checkpoint" in (line := record.getMessage())]
    expected = (
        f"Foreign goes on with settings of the checkpoint (the recipe's in brackets): {kept}; with OptimizerMixin"
    )
    assert len(said) == (kept is not None)
    assert not said or said[0].startswith(expected)
    assert trainer.optimizers[0].param_groups[0].get("initial_lr", trainer.optimizers[0].param_groups[0]["lr"]) == 0.1


@pytest.mark.parametrize(
    ("model", "then", "kept"),
    [
        ("Sequence", 8, "CosineAnnealingLR[2].T_max 4 (8)"),
        ("Milestones", 8, "MultiStepLR.milestones [1, 4] ([1, 8])"),
        ("Cycle", 4, None),
        ("Cycle", 8, "OneCycleLR.total_steps 4 (8)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_schedules_made_of_others_with_milestones_or_with_a_momentum_are_compared_as_well(
    tmp_path, monkeypatch, caplog, model, then, kept
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="lightning.pytorch")
    fit("--trainer.max_steps=2", "--model.length=4", model=model)
    path = "checkpoints/epoch=0-step=2.ckpt"
    fit("--trainer.max_steps=3", f"--ckpt_path={path}", f"--model.length={then}", model=model)
    said = [line for record in caplog.records if "settings of the checkpoint" in (line := record.getMessage())]
    assert [line.partition("brackets): ")[2].partition(";")[0] for line in said] == ([] if kept is None else [kept])


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_an_optimizer_of_its_own_hears_of_a_run_without_validation(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    for steps in (3, 2):
        fit(f"--trainer.max_steps={steps}", "--trainer.val_check_interval=3", model="Validated")
        said = [str(one.message) for one in recwarn if "no validation" in str(one.message)]
        assert bool(said) == (steps == 2)
