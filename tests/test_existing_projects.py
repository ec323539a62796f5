"""Every monitor at once on modules that know nothing of the collection, also under pytorch_lightning."""

import json
import math
import os
import subprocess

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness.models import Small, adamw
from harness.preloaded import python
from harness.runs import Memory, fit, same_training
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt


def monitors() -> list[pl.Callback]:
    return [
        lt.GradNormMonitor(), lt.LRMonitor(), lt.MFUMonitor(), lt.MemoryMonitor(), lt.GoodputMonitor(),
        lt.ActivationMonitor(), lt.UpdateMonitor(), lt.AttentionMonitor(), lt.TensorBoardDashboard(),
    ]  # fmt: skip


def rows(form) -> DataLoader:
    """Sixteen rows in batches of four, as `form` makes them of 12 token ids."""
    drawn = torch.randint(32, (16, 12), generator=torch.Generator().manual_seed(0))
    return DataLoader([form(row) for row in drawn], batch_size=4)


def tagger(ids_of, kind=Small):
    """Predicts the next token from the one before; dropout, so that a drawn random number would show."""

    def loss(module, batch):
        ids = ids_of(batch)
        return F.cross_entropy(module(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 32))
    return kind(net=net, loss=loss, optimizer=adamw)


class Named(Small):
    def tokens_in(self, batch):
        return batch.shape[0] * 100


class Gan(pl.LightningModule):
    """Two optimizers, in turns, by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            fake = self.generator(torch.randn(len(batch), 4))
            real = self.critic(batch).mean() if sign < 0 else 0.0
            loss = sign * self.critic(fake).mean() + real
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(part.parameters(), lr=lr) for part, lr in ((self.generator, 1e-3), (self.critic, 2e-3))
        ]


def mask(ids):
    return {"n": torch.tensor(1), "input_ids": ids, "attention_mask": (torch.arange(12) < 9).long()}


MODULES = {
    "tensor": (lambda: tagger(lambda batch: batch), lambda ids: ids, 4 * 12),
    "tuple": (lambda: tagger(lambda batch: batch[0]), lambda ids: (ids, ids), 4 * 12),
    "dict": (lambda: tagger(lambda batch: batch["input_ids"]), mask, 4 * 9),
    "own tokens_in": (lambda: tagger(lambda batch: batch, Named), lambda ids: ids, 400),
    "gan": (Gan, lambda ids: ids[:8].float(), None),
}


def trained(name: str, *callbacks, **options):
    make, form, _ = MODULES[name]
    return fit(make(), *callbacks, data=rows(form), **{"max_steps": 8, **options})


@pytest.mark.parametrize("name", MODULES)
def test_all_monitors_at_once_leave_training_bitwise_unchanged(name):
    run = trained(name, *monitors())
    assert same_training(trained(name), run)
    steps = 4 if name == "gan" else 8  # the GAN's two optimizers count two of max_steps a batch
    found = run.names()
    several = ["/0", "/1"] if name == "gan" else [""]
    for suffix in several:
        for metric in ("train/grad_norm", "train/lr"):
            values = {step: row[metric + suffix] for step, row in run.rows if metric + suffix in row}
            assert sorted(values) == list(range(steps))
            assert all(value > 0 for value in values.values())
    assert {"throughput/samples_per_second", "throughput/step_seconds", "memory/rss_gib"} <= found
    assert any(n.startswith("activations/") for n in found)
    assert any(n.startswith("updates/") for n in found)
    tokens = MODULES[name][2]
    assert ("throughput/tokens_per_second" in found) == (tokens is not None)
    if tokens:
        pairs = zip(run.of("throughput/tokens_per_second"), run.of("throughput/samples_per_second"), strict=True)
        assert [a / b for a, b in pairs] == pytest.approx([tokens / 4] * len(run.of("throughput/samples_per_second")))
    assert all(math.isfinite(value) for _, row in run.rows for value in row.values())


def test_an_optimizer_without_gradients_and_a_batch_without_tensors_do_not_stop_the_run():
    def groups(parameters):
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.2}], lr=0.1)

    weights = nn.ParameterList([torch.ones(()), torch.ones(3)])  # the second is not used
    odd = Small(net=weights, loss=lambda module, batch: module.net[0] * len(batch), optimizer=groups)
    with pytest.warns(UserWarning, match="AttentionMonitor records nothing"):
        run = fit(odd, *monitors(), data=DataLoader([["a", "b"]] * 6, batch_size=None), max_steps=6)
    assert run.of("train/grad_norm") == [2.0] * 6
    assert run.of("train/lr") == [0.1] * 6


def test_stock_loggers_and_stock_callbacks_beside_them(tmp_path):
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb"), Memory()]
    stop = pl.callbacks.EarlyStopping("train/grad_norm", patience=99, check_on_train_epoch_end=True)
    save = pl.callbacks.ModelCheckpoint(tmp_path, monitor="throughput/step_seconds", every_n_train_steps=4)
    rate = pl.callbacks.LearningRateMonitor()
    trained("tuple", lt.TrainingProgressBar(), save, stop, rate, *monitors(), logger=loggers)
    assert list(tmp_path.glob("*.ckpt"))
    assert "train/grad_norm" in (tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()[0]


PROJECT = """
import json, sys, warnings
import pytorch_lightning as pl
import torch
import lightning_tricks as lt
from lightning_tricks._trainer.lightning import BACKEND

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

save = pl.callbacks.ModelCheckpoint(".", monitor="train/grad_norm", every_n_train_steps=3, filename="{{step}}")
trainer = pl.Trainer(
    max_steps=6, log_every_n_steps=4, accelerator="cpu", devices=1, logger=pl.loggers.CSVLogger(".", "logs"),
    callbacks=[save, {bar}lt.GradNormMonitor(), lt.LRMonitor(), lt.MFUMonitor(), lt.MemoryMonitor(),
               lt.ActivationMonitor(), lt.UpdateMonitor(), lt.TensorBoardDashboard()],
    {bar_option}
)
data = torch.utils.data.TensorDataset(torch.arange(48.).view(12, 4) / 48)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
imported = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
print("RESULT", json.dumps({{
    "backend": BACKEND, "imported": imported, "saved": sorted(save.best_k_models),
    "metrics": sorted(trainer.callback_metrics),
    "order": [type(c).__name__ for c in trainer.callbacks[-2:]],
}}))
"""


def project(tmp_path, bar: str = "lt.TrainingProgressBar(), ", bar_option: str = "", **env: str):
    script = PROJECT.format(bar=bar, bar_option=bar_option)
    # from a server that has not imported the collection; test_package.py has all choices
    run = subprocess.run(
        [python("pytorch_lightning"), "-c", script], cwd=tmp_path, env={**os.environ, **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    wanted = {"train/grad_norm", "train/lr", "throughput/mfu", "memory/rss_gib", "train_loss"}
    assert wanted <= set(found["metrics"])
    header, *rows = (tmp_path / "logs/version_0/metrics.csv").read_text().splitlines()
    place = header.split(",").index("train/grad_norm")
    assert sum(bool(row.split(",")[place]) for row in rows) == 6
    assert found["order"] == ["MetricBuffer", "ModelCheckpoint"]
    assert len(found["saved"]) == 1
    return found, run.stdout


@pytest.mark.long
def test_the_collection_builds_on_the_package_that_the_program_imported(tmp_path):
    found, out = project(tmp_path)
    assert found["backend"] == "pytorch_lightning"
    assert "step 6/6 (100%)" in out
    assert "norm" in out


NAMED = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
import lightning_tricks

assert not any(name.startswith("lightning_tricks.strategies") for name in sys.modules)
if "short" in sys.argv:
    sys.argv.remove("short")
    from lightning_tricks import callbacks, precision
quiet = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False}
cli = LightningCLI(BoringModel, BoringDataModule, trainer_defaults=quiet, save_config_callback=None)
parts = [cli.trainer.strategy, cli.trainer.precision_plugin, *cli.trainer.callbacks]
print("PARTS", cli.trainer.global_step, *(type(part).__name__ for part in parts))
"""


@pytest.mark.long
def test_a_plain_lightning_cli_takes_strategies_by_name_and_classes_by_short_names_once_they_are_imported(tmp_path):
    def parts(*words: str) -> list[str]:
        words = ["fit", *words]
        run = subprocess.run(
            [python("pytorch_lightning"), "-c", NAMED, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        return next(line for line in run.stdout.splitlines() if line.startswith("PARTS")).split()[1:]

    strategy = ["--trainer.strategy=fsdp2", "--trainer.devices=1"]
    *found, _ = parts(*strategy, "--trainer.callbacks=lightning_tricks.GradNormMonitor")
    assert found[:4] == ["2", "FSDP2Strategy", "Precision", "GradNormMonitor"]
    found = parts("short", "--trainer.plugins=BF16Mixed", "--trainer.callbacks=StepGuard")
    assert found[:4] == ["2", "SingleDeviceStrategy", "BF16Mixed", "StepGuard"]


@pytest.mark.long
def test_monitors_of_one_package_work_under_the_trainer_of_the_other(tmp_path):
    option = "enable_progress_bar=False,"  # a bar of the other package is not known as one
    found, _ = project(tmp_path, "", option, LIGHTNING_TRICKS_BACKEND="lightning")
    assert found["backend"] == "lightning"
    assert set(found["imported"]) == {"lightning.pytorch", "pytorch_lightning"}
