"""Several runs in one folder: SafeCheckpoint counts and deletes the checkpoints of its own run, and no others."""

import os
import shutil
from pathlib import Path
from typing import Any

from guards.test_safe_checkpoint import Batches, fit, names, steps
from guards.test_safe_checkpoint import lines_of as all_lines_of
from harness.runs import On

from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.record import read_record


def saver(folder: Path, keep_last: int = 2, **options: Any) -> SafeCheckpoint:
    return SafeCheckpoint(folder, every_n_train_steps=2, keep_last=keep_last, **options)


def lines_of(*args: Any, **options: Any) -> list[str]:
    """The lines of a fit on checkpoints that it did not write."""
    return [line for line in all_lines_of(*args, **options) if "this run did not write" in line]


def runs(folder: Path) -> list[str | None]:
    """The runs of the checkpoints in a folder, in the order of their saves."""
    records = sorted((read_record(path) for path in folder.glob("step=*.ckpt")), key=lambda record: record.number)
    return [record.run for record in records]


def test_a_fresh_start_leaves_the_checkpoints_of_the_run_before_and_says_so_in_one_line(tmp_path):
    assert lines_of(saver(tmp_path), 20) == []
    assert steps(tmp_path) == [18, 20]
    assert lines_of(saver(tmp_path), 8) == [
        f"SafeCheckpoint: {tmp_path} holds checkpoints that this run did not write (2, the newest is step=20.ckpt): "
        "it neither counts nor deletes them, so delete yourself what you do not need"
    ]
    assert steps(tmp_path) == [6, 8, 18, 20]
    assert os.readlink(tmp_path / "last.ckpt") == "step=8.ckpt"
    for path in tmp_path.glob("step=*.ckpt"):
        verify_checkpoint(path, resumes=True)
    first, second = dict.fromkeys(runs(tmp_path))
    assert runs(tmp_path) == [first, first, second, second]


def test_of_two_runs_in_a_folder_each_goes_on_with_its_own(tmp_path):
    fit(saver(tmp_path), 4)
    fit(saver(tmp_path, keep_last=1), 2)
    assert names(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "step=2-v1.ckpt", "last.ckpt"}
    assert os.readlink(tmp_path / "last.ckpt") == "step=2-v1.ckpt"
    first, _ = dict.fromkeys(runs(tmp_path))
    fit(saver(tmp_path, keep_last=1), 6, ckpt_path=tmp_path / "step=4.ckpt")
    assert names(tmp_path) == {"step=4.ckpt", "step=6.ckpt", "step=2-v1.ckpt", "last.ckpt"}
    assert read_record(tmp_path / "step=6.ckpt").run == first
    fit(saver(tmp_path, keep_last=1), 4, ckpt_path=tmp_path / "step=2-v1.ckpt")
    assert names(tmp_path) == {"step=4.ckpt", "step=6.ckpt", "step=2-v1.ckpt", "step=4-v1.ckpt", "last.ckpt"}


def test_the_best_of_another_run_is_not_the_best_of_this_one(tmp_path):
    options = {"val_check_interval": 2, "limit_val_batches": 1, "check_val_every_n_epoch": None}
    fit(saver(tmp_path, keep_last=1, monitor="val/loss"), 6, **options)
    second = saver(tmp_path, keep_last=1, monitor="val/loss")
    fit(second, 2, **options)
    assert second.best_model_path == str(tmp_path / "step=2.ckpt")
    assert steps(tmp_path) == [2, 6]


def test_a_fit_that_goes_on_with_its_trainer_is_the_same_run_and_a_new_trainer_begins_one(tmp_path):
    own = saver(tmp_path, keep_last=1)
    trainer, model = fit(own, 4)
    trainer.fit_loop.epoch_loop.max_steps = 6
    loader = Batches()
    loader.trainer = trainer
    trainer.fit(model, loader)
    assert steps(tmp_path) == [6]
    fit(own, 2)
    assert steps(tmp_path) == [2, 6]


def test_two_savers_of_a_trainer_name_one_run(tmp_path):
    fit([saver(tmp_path / "a"), saver(tmp_path / "b")], 4)
    assert runs(tmp_path / "a") == runs(tmp_path / "b")
    fit([saver(tmp_path / "a", 1), saver(tmp_path / "b", 1)], 6, ckpt_path=tmp_path / "a/step=4.ckpt")
    assert (steps(tmp_path / "a"), steps(tmp_path / "b")) == ([4, 6], [6])


def test_a_copy_that_the_user_made_stays(tmp_path):
    def copies(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            shutil.copy(tmp_path / "step=2.ckpt", tmp_path / "mine.ckpt")
            shutil.copytree(tmp_path, tmp_path / "all", symlinks=True)

    fit([On(on_train_batch_end=copies), saver(tmp_path, keep_last=1)], 8)
    assert names(tmp_path) == {"step=8.ckpt", "last.ckpt", "mine.ckpt", "all"}
    assert names(tmp_path / "all") == {"step=2.ckpt", "last.ckpt", "mine.ckpt"}


def test_the_same_seed_gives_every_run_a_name_of_its_own_and_moves_no_random_number(tmp_path):
    first, second = (fit(saver(tmp_path), 2)[1] for _ in range(2))
    assert first.losses == second.losses
    assert len(set(runs(tmp_path))) == 2
