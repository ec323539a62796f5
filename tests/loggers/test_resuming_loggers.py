"""Both loggers that go on after a resume: each step stands once, and nothing changes for the training."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from short_run import Model, Raise, fit, points, save_every

from lightning_tricks.loggers import ResumingCSVLogger, ResumingTensorBoardLogger

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning on resuming in mid-epoch
KINDS = {"csv": (ResumingCSVLogger, CSVLogger), "tensorboard": (ResumingTensorBoardLogger, TensorBoardLogger)}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def logger(kind, folder, lightnings: bool = False):
    return KINDS[kind][lightnings](folder, name="run", version="")


def values(kind, folder, name: str = "train/loss") -> list[tuple[int, float]]:
    if kind == "tensorboard":
        return points(folder / "run", name)
    with open(folder / "run" / "metrics.csv", newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def of_runs(*lengths: tuple[int, range]) -> list[tuple[int, float]]:
    return [(step, 1000.0 * run + step) for run, steps in lengths for step in steps]


@pytest.mark.parametrize("lightnings", [False, True])
def test_a_replayed_step_stands_once_with_the_resumed_runs_value(tmp_path, kind, lightnings):
    callbacks = (save_every(10, tmp_path), Raise(17))
    with pytest.raises(RuntimeError, match="power cut"):
        fit(logger(kind, tmp_path, lightnings), 20, callbacks=callbacks, enable_checkpointing=True)
    assert values(kind, tmp_path) == of_runs((1, range(17)))
    fit(logger(kind, tmp_path), 20, model=Model(run=2), ckpt_path=tmp_path / "step=10.ckpt")
    assert values(kind, tmp_path) == of_runs((1, range(10)), (2, range(10, 20)))
    assert values(kind, tmp_path, "val/loss") == [(4, 1004), (9, 1009), (14, 2014), (19, 2019)]
    fit(logger(kind, tmp_path), 16, model=Model(run=3), ckpt_path=tmp_path / "step=10.ckpt")
    assert values(kind, tmp_path) == of_runs((1, range(10)), (3, range(10, 16)))


def test_a_fresh_start_in_a_used_folder_shows_nothing_of_the_earlier_run(tmp_path, kind):
    fit(logger(kind, tmp_path), 9)
    fit(logger(kind, tmp_path), 6, model=Model(run=2))
    assert values(kind, tmp_path) == of_runs((2, range(6)))


@pytest.mark.parametrize(
    ("manual", "options", "saved", "steps"),
    [
        (True, {}, 10, 24),  # Lightning's `global_step` counts the steps of both optimizers, its loggers count batches
        (False, {"accumulate_grad_batches": 2, "val_check_interval": 40}, 5, 12),
    ],
    ids=["two optimizers", "accumulation"],
)
def test_steps_are_those_of_the_loggers(tmp_path, kind, manual, options, saved, steps):
    save = {"callbacks": (save_every(saved, tmp_path),), "enable_checkpointing": True}
    fit(logger(kind, tmp_path), steps, model=Model(manual=manual), **save, **options)
    resumed = Model(run=2, manual=manual)
    fit(logger(kind, tmp_path), steps, model=resumed, ckpt_path=tmp_path / f"step={saved}.ckpt", **options)
    assert values(kind, tmp_path) == of_runs((1, range(5)), (2, range(5, 12)))


def test_other_ranks_write_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    one = logger(kind, tmp_path)
    one.log_metrics({"x": 1.0}, 0)
    one.log_hyperparams({"lr": 1.0})
    one.log_graph(Model())
    one.resume_at(3)
    one.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_training_is_bitwise_unchanged(tmp_path, kind):
    with_it = fit(logger(kind, tmp_path), 6).lightning_module
    without = fit(False, 6).lightning_module
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))
