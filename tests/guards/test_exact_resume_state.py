"""ExactResume and the state that Lightning leaves out of a checkpoint: from each one, the run has the unbroken bits."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from harness import runs
from harness.models import rows
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_tricks import ExactResume, SafeCheckpoint
from lightning_tricks.guards.exact_resume.extra_state import NOT_EXACT, warn_of_other_callbacks

BATCHES, EPOCHS = 3, 3
PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 0.0}


class Model(pl.LightningModule):
    """Logs metrics that go up and down, and writes each step's learning rates down."""

    def __init__(self, interval=None, frequency=1, monitor="val"):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 1)
        self.schedule = {"interval": interval, "frequency": frequency, "monitor": monitor, "strict": False}
        self.lrs = []

    def training_step(self, batch, batch_idx):
        loss = self.head(self.backbone(batch)).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.tensor(float(self.trainer.global_step * 7 % 5)))

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append((self.trainer.global_step, [group["lr"] for group in optimizer.param_groups]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)
        if self.schedule["interval"] is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **PLATEAU)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.schedule}}


MID_EPOCH = {"val_check_interval": 2}
CASES = {
    "a plateau of epochs": (lambda: Model("epoch"), lambda: [], {}),
    "a plateau of every second epoch": (lambda: Model("epoch", 2), lambda: [], {}),
    "a plateau of epochs, validation in mid-epoch": (lambda: Model("epoch"), lambda: [], MID_EPOCH),
    "a plateau of steps": (lambda: Model("step"), lambda: [], {**MID_EPOCH, "num_sanity_val_steps": 1}),
    "a plateau of every second step": (lambda: Model("step", 2), lambda: [], MID_EPOCH),
    "a growing accumulation": (Model, lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], {}),
    "a backbone that is unfrozen": (Model, lambda: [BackboneFinetuning(1, lambda epoch: 1.5)], {}),
    "an average of the weights": (Model, lambda: [callbacks.EMAWeightAveraging(decay=0.5)], {}),
    "the mean of the weights": (Model, lambda: [callbacks.WeightAveraging()], {}),
    "an early end": (Model, lambda: [callbacks.EarlyStopping("val", patience=2)], {}),
    "a limit of time": (Model, lambda: [callbacks.Timer("00:01:00:00")], {}),
    "its norms stay frozen": (Model, lambda: [BackboneFinetuning(1, lambda epoch: 1.5, train_bn=False)], {}),
}
MEANS = {
    "a mean over an epoch": (lambda: Model("epoch", monitor="loss"), lambda: [], {}),
    "a metric of the last batch": (lambda: Model("step", monitor="loss"), lambda: [], {}),
}
SAVERS = {
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1),
    "SafeCheckpoint": lambda folder: SafeCheckpoint(folder, every_n_train_steps=1, keep_last=100),
}
PAIRS = [*((case, "ModelCheckpoint") for case in CASES), *((case, "SafeCheckpoint") for case in list(CASES)[:2])]


def fit(case, saver, ckpt_path=None):
    """Weights and learning rates of the steps of a run, and the lines in which ExactResume warned."""
    pl.seed_everything(1, verbose=False)
    make, others, options = (CASES | MEANS)[case]
    module = make()
    options = {"max_epochs": EPOCHS, "max_steps": -1, "num_sanity_val_steps": 0, "logger": False} | options
    data, val = DataLoader(rows(2 * BATCHES, 4), 2, shuffle=True), DataLoader(torch.ones(2, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.fit(module, ExactResume(), *others(), saver, data=data, val=val, ckpt_path=ckpt_path, **options)
    trained = [(name, one.requires_grad) for name, one in module.named_parameters()]
    lines = [line for line in (str(one.message) for one in caught) if line.startswith("ExactResume")]
    return {"weights": module.state_dict(), "lrs": module.lrs, "trained": trained}, lines


@pytest.mark.parametrize(("case", "saver"), PAIRS)
def test_from_the_checkpoints_of_two_epochs_the_rest_is_the_same(tmp_path, case, saver):
    unbroken, _ = fit(case, SAVERS[saver](tmp_path))
    checkpoints = sorted(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem[5:]))
    assert len(checkpoints) == unbroken["lrs"][-1][0] + 1
    for checkpoint in checkpoints[1:6]:  # in mid-epoch, at an epoch's end, and of the next one
        rest, _ = fit(case, SAVERS[saver](tmp_path / checkpoint.stem), ckpt_path=checkpoint)
        step = int(checkpoint.stem[5:])
        assert rest["lrs"] == unbroken["lrs"][step:], checkpoint
        assert rest["trained"] == unbroken["trained"], checkpoint
        for name, value in rest["weights"].items():
            assert torch.equal(value, unbroken["weights"][name]), (checkpoint, name)


def test_a_scheduler_that_sees_a_mean_over_an_epoch_is_named_at_the_start(tmp_path):
    _, (line,) = fit("a mean over an epoch", ModelCheckpoint(tmp_path))
    assert line.startswith("ExactResume: ReduceLROnPlateau monitors 'loss', a mean over the batches of an epoch")
    assert "monitor a metric of validation" in line
    assert "\n" not in line
    assert fit("a metric of the last batch", ModelCheckpoint(tmp_path))[1] == []


# Lightning's callbacks beside which a resume has the bits of the unbroken run: of `CASES`, or tested with each saver
EXACT = {
    "BackboneFinetuning", "BaseFinetuning", "Checkpoint", "EMAWeightAveraging", "EarlyStopping",
    "GradientAccumulationScheduler", "ModelCheckpoint", "Timer", "WeightAveraging",
}  # fmt: skip
# those that only watch, write or show, or do what the user's own code says
WATCH = {
    "BasePredictionWriter", "Callback", "DeviceStatsMonitor", "LambdaCallback", "LearningRateMonitor", "ModelSummary",
    "OnExceptionCheckpoint", "ProgressBar", "RichModelSummary", "RichProgressBar", "TQDMProgressBar",
    "ThroughputMonitor",
}  # fmt: skip


def test_of_each_of_lightnings_callbacks_it_is_known_whether_a_resume_is_exact_beside_it():
    groups = [EXACT, WATCH, set(NOT_EXACT)]
    assert sorted(name for group in groups for name in group) == sorted(callbacks.__all__)
    page = (Path(__file__).parents[2] / "docs" / "exact_resume.md").read_text()
    assert [name for name in callbacks.__all__ if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", NOT_EXACT)
def test_beside_a_callback_that_a_resume_does_not_follow_one_line_says_so(name, recwarn):
    own: type = type("Mine", (getattr(callbacks, name),), {})  # a subclass of somebody's counts too
    warn_of_other_callbacks(SimpleNamespace(callbacks=[ModelCheckpoint(), own.__new__(own)]))
    (line,) = (str(warned.message) for warned in recwarn)
    assert line.startswith("ExactResume: beside Mine a resume is not exact: it ")
    assert "\n" not in line


def test_the_line_comes_when_the_fit_starts(tmp_path):
    case = (Model, lambda: [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)], {})
    with mock.patch.dict(CASES, {"swa": case}):
        _, (line,) = fit("swa", ModelCheckpoint(tmp_path))
    assert line.startswith("ExactResume: beside StochasticWeightAveraging a resume is not exact: it saves its average")
