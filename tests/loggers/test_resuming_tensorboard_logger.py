"""After a resume each step stands once in TensorBoard, and a step's metrics are one event."""

import os
import subprocess
import sys
import time

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness.preloaded import python
from harness.runs import On, trainer_with
from short_run import Model, fit, points, save_every
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.loggers.resuming_loggers import ResumePoint

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning on resuming in mid-epoch


def logger(folder, **options) -> ResumingTensorBoardLogger:
    return ResumingTensorBoardLogger(folder, **{"name": "run", "version": "", **options})


def of_runs(*lengths: tuple[int, range]) -> list[tuple[int, float]]:
    return [(step, 1000.0 * run + step) for run, steps in lengths for step in steps]


def raw(folder) -> list:
    """All events with metrics, as they stand on disk."""
    files = sorted(folder.glob("*tfevents*"))
    return [event for file in files for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]


def test_a_logger_may_go_back_in_a_second_fit(tmp_path):
    one = logger(tmp_path)
    fit(one, 12, callbacks=(save_every(5, tmp_path),), enable_checkpointing=True)
    fit(one, 8, model=Model(run=2), ckpt_path=tmp_path / "step=5.ckpt")
    assert points(tmp_path / "run", "train/loss") == of_runs((1, range(5)), (2, range(5, 8)))


def test_a_second_fit_of_the_same_trainer_loses_nothing(tmp_path):
    trainer = fit(logger(tmp_path), 4)
    time.sleep(1.0)
    trainer.fit_loop.epoch_loop.max_steps = 8
    model = trainer.lightning_module
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(20, 2)))
    assert points(tmp_path / "run", "train/loss") == of_runs((1, range(8)))


def test_a_validation_before_the_fit_keeps_its_point(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(8, 2))
    trainer = trainer_with(logger=logger(tmp_path), max_steps=3, log_every_n_steps=1)
    model = Model()
    trainer.validate(model, data, verbose=False)
    assert not any(isinstance(callback, ResumePoint) for callback in trainer.callbacks)
    time.sleep(1.0)
    trainer.fit(model, data)
    assert points(tmp_path / "run", "val/loss") == [(0, 1000)]
    assert [step for step, _ in points(tmp_path / "run", "train/loss")] == [0, 1, 2]


def test_without_a_trainer_resume_at_is_called_by_hand(tmp_path):
    for run in (1, 2):
        by_hand = logger(tmp_path)
        if run == 2:
            time.sleep(1.0 - time.time() % 1.0)
            by_hand.resume_at(2)
        for step in range(2 * (run - 1), 4):
            by_hand.log_metrics({"x": 10.0 * run + step}, step)
        by_hand.finalize("success")
    assert points(tmp_path / "run", "x") == [(0, 10), (1, 11), (2, 22), (3, 23)]


def test_a_fresh_folder_gets_no_purge(tmp_path):
    one = logger(tmp_path)
    one.log_metrics({}, 1)  # writes no event
    one.log_metrics({"x": 1.0}, 5)
    one.resume_at(3)
    one.finalize("success")
    assert len(raw(tmp_path / "run")) == 1
    assert points(tmp_path / "run", "x") == [(5, 1)]


def test_all_numbers_of_a_call_are_one_event_at_the_time_that_was_given(tmp_path):
    one = logger(tmp_path)
    one.log_metrics(
        {"a": 1.5, "b": torch.tensor(2.5), "c": np.float32(3.5), "d": torch.tensor([4]), "e": True}, 7, 123.5
    )
    before = time.time()
    one.log_metrics({"a": 0.5}, 8)
    one.finalize("success")
    given, now = raw(tmp_path / "run")
    assert (given.step, given.wall_time) == (7, 123.5)
    assert [value.tag for value in given.summary.value] == list("abcde")
    assert [points(tmp_path / "run", tag)[0] for tag in "abcde"] == [(7, 1.5), (7, 2.5), (7, 3.5), (7, 4.0), (7, 1.0)]
    assert before <= now.wall_time <= time.time()
    assert one.takes_wall_time


def test_what_is_no_number_is_left_to_lightning(tmp_path):
    one = logger(tmp_path)
    one.log_metrics({"pair": {"left": 1.0, "right": 2.0}, "x": 3.0}, 1)
    with pytest.raises(ValueError, match="you tried to log"):
        one.log_metrics({"x": "text"}, 2)
    with pytest.raises(ValueError, match="you tried to log"):
        one.log_metrics({"x": np.ones(2)}, 2)
    one.finalize("success")
    assert points(tmp_path / "run", "x") == [(1, 3)]
    assert points(tmp_path / "run" / "pair_left", "pair") == [(1, 1)]


def test_the_prefix_stands_before_each_name_once(tmp_path):
    one = logger(tmp_path, prefix="exp")
    one.log_metrics({"x": 1.0, "pair": {"left": 1.0}}, 0)
    one.finalize("success")
    assert points(tmp_path / "run", "exp-x") == [(0, 1)]
    assert points(tmp_path / "run" / "exp-pair_left", "exp-pair") == [(0, 1)]


def test_hyperparameters_of_a_resumed_run_come_after_the_purge(tmp_path):
    for step, expected in ((0, [0]), (0, [0]), (3, [0, 3])):
        one = logger(tmp_path)
        one.log_hyperparams({"lr": 1.0})
        one.resume_at(step)
        one.finalize("success")
        assert points(tmp_path / "run", "hp_metric") == [(at, -1) for at in expected]
        time.sleep(1.0 - time.time() % 1.0)
    third = logger(tmp_path)
    third.log_hyperparams({"lr": 1.0}, {"result": 5.0})
    third.log_hyperparams({"lr": 1.0}, {"other": 6.0}, step=2)
    third.finalize("success")  # never resumed: nothing is lost
    assert points(tmp_path / "run", "result") == [(0, 5)]
    assert points(tmp_path / "run", "other") == [(2, 6)]


def test_a_resume_into_a_new_folder_says_how_to_go_on_in_the_old_one(tmp_path, caplog):
    said = 'give the logger a version, such as ""'
    with caplog.at_level("INFO"):
        logger(tmp_path, version=None).resume_at(0)
        logger(tmp_path, version="fixed").resume_at(10)
        assert said not in caplog.text
        logger(tmp_path, version=None).resume_at(10)
        assert said in caplog.text
        assert "step 10 starts the new folder" in caplog.text


def test_the_callback_that_tells_the_step_leaves_after_the_first_batch(tmp_path):
    seen = []

    def count(trainer, *_):
        seen.append(sum(isinstance(callback, ResumePoint) for callback in trainer.callbacks))

    plain = pl.loggers.CSVLogger(tmp_path, name="plain", version="")  # knows of no resume
    trainer = fit(
        [logger(tmp_path), logger(tmp_path, name="other"), plain], 2, callbacks=(On(on_train_batch_end=count),)
    )
    assert seen == [0, 0]
    assert len((tmp_path / "plain" / "metrics.csv").read_text().splitlines()) == 3
    ResumePoint.watch(trainer.lightning_module)
    ResumePoint.watch(trainer.lightning_module)
    assert sum(isinstance(callback, ResumePoint) for callback in trainer.callbacks) == 1


@pytest.mark.long
def test_under_pytorch_lightning_each_step_stands_once_too(tmp_path):
    code = f"""
import pytorch_lightning
from pathlib import Path
from short_run import Model, fit, points, save_every
from lightning_tricks.loggers import ResumingCSVLogger, ResumingTensorBoardLogger
folder = Path({str(tmp_path)!r})
def both():
    return [ResumingTensorBoardLogger(folder, name="t", version=""), ResumingCSVLogger(folder, name="c", version="")]
fit(both(), 12, callbacks=(save_every(5, folder),), enable_checkpointing=True)
trainer = fit(both(), 8, model=Model(run=2), ckpt_path=folder / "step=5.ckpt")
assert type(trainer).__module__.startswith("pytorch_lightning"), type(trainer)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python("pytorch_lightning"), "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert points(tmp_path / "t", "train/loss") == of_runs((1, range(5)), (2, range(5, 8)))
    lines = (tmp_path / "c" / "metrics.csv").read_text().splitlines()
    assert sum(",2006.0," in f"{line}," for line in lines) == 1
    assert not any("1006.0" in line for line in lines)
