"""Several runs in one folder: SafeCheckpoint counts and deletes the checkpoints of its own run, and no others."""

import copy
import json
import os
import pickle
import shutil
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_run_folder import RUN_OF_TOY, command_line
from guards.test_safe_checkpoint import Batches, Model, fit, names, steps
from guards.test_safe_checkpoint import lines_of as all_lines_of
from harness import processes
from harness.runs import On, trainer_with

from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.record import KEY, Record, read_record
from lightning_tricks.checkpoints.write_file import save_with_record


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
        "it neither counts nor deletes them, so delete by hand what you do not need"
    ]
    assert steps(tmp_path) == [6, 8, 18, 20]
    assert os.readlink(tmp_path / "last.ckpt") == "step=8.ckpt"
    for path in tmp_path.glob("step=*.ckpt"):
        verify_checkpoint(path, resumes=True)
    first, second = dict.fromkeys(runs(tmp_path))
    assert runs(tmp_path) == [first, first, second, second]


def test_a_run_that_is_resumed_keeps_its_name_and_counts_what_it_wrote_before(tmp_path):
    fit(saver(tmp_path), 4)
    fit(saver(tmp_path), 6, ckpt_path=tmp_path / "last.ckpt")
    assert lines_of(saver(tmp_path, keep_last=1), 8, ckpt_path=tmp_path / "last.ckpt") == []
    assert steps(tmp_path) == [6, 8]  # 6 is the one that it went on from
    assert len(set(runs(tmp_path))) == 1


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


def as_version_1(path: Path) -> None:
    """Write a checkpoint anew as the first version of the record had it: without the name of the run."""
    checkpoint = torch.load(path, weights_only=True)
    record = replace(read_record(path), version=1)
    fields = {name: value for name, value in asdict(record).items() if name not in ("run", "checksums")}
    checkpoint[KEY]["record"] = fields
    save_with_record(checkpoint, path)
    assert read_record(path) == replace(record, run=None, checksums=read_record(path).checksums)


def test_checkpoints_of_before_runs_had_names_resume_stay_and_are_named_in_the_line(tmp_path):
    fit(saver(tmp_path), 4)
    for path in tmp_path.glob("step=*.ckpt"):
        as_version_1(path)
    whole = fit(saver(tmp_path / "whole", 9), 8)[1]
    resumed = Model()
    said = lines_of(saver(tmp_path, keep_last=1), 8, resumed, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.losses == whole.losses[4:]
    assert len(said) == 1
    assert "did not write (2, the newest is step=4.ckpt)" in said[0]
    assert steps(tmp_path) == [2, 4, 8]
    assert lines_of(saver(tmp_path, keep_last=1), 10, ckpt_path=tmp_path / "last.ckpt") == []  # it was said
    assert steps(tmp_path) == [2, 4, 8, 10]


def test_the_text_of_a_record_without_a_run_is_read_as_it_was_written(tmp_path):
    """The bytes of version 1: a folder's `record.json`."""
    content = {"step": 4, "number": 2, "finite": True, "score": None, "permanent": False, "version": 1, "checksums": {}}
    (tmp_path / "record.json").write_text(
        json.dumps({"record": content, "crc32": zlib.crc32(json.dumps(content).encode())})
    )
    assert read_record(tmp_path) == Record(4, 2, True, version=1)


def test_the_command_line_with_a_fixed_version_leaves_the_earlier_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = "[{class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2}}]"
    given = ["--trainer.logger.version=0", "--data=null"]
    command_line("fit", *given, "--trainer.max_steps=4", "--trainer.max_epochs=9", saver=own)
    with pytest.warns(
        UserWarning, match=r"holds checkpoints that this run did not write \(2, the newest is step=4.ckpt"
    ):
        command_line("fit", *given, "--trainer.max_steps=6", "--trainer.max_epochs=9", saver=own)
    folder = tmp_path / RUN_OF_TOY / "checkpoints"
    assert names(folder) == {"step=2.ckpt", "step=4.ckpt", "step=4-v1.ckpt", "step=6.ckpt", "last.ckpt"}


def on_two_ranks(rank: int, folder: Path) -> None:
    options = {"devices": 2, "strategy": "ddp"}
    fit(saver(folder), 4, **options)
    own = saver(folder, keep_last=1)
    fit(own, 6, ckpt_path=folder / "last.ckpt", **options)
    assert own._run == read_record(folder / "step=4.ckpt").run  # on each rank
    fit(saver(folder), 2, **options)
    torch.distributed.barrier()
    assert steps(folder) == [2, 4, 6]


@pytest.mark.long
def test_two_ranks_agree_on_the_run(tmp_path):
    processes.run(on_two_ranks, tmp_path)


# ---- after the fit


def test_after_a_fit_the_saver_and_its_trainer_can_be_pickled_and_copied(tmp_path):
    own = saver(tmp_path)
    trainer, _ = fit(own, 4, loader=torch.utils.data.DataLoader(torch.ones(64, 3)))
    for copied in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        other = copied.checkpoint_callback
        assert other.best_model_path == own.best_model_path
        trainer_with(other, max_steps=6, logger=False).fit(
            Model(), torch.utils.data.DataLoader(torch.ones(64, 3)), ckpt_path=tmp_path / "step=4.ckpt"
        )
        assert steps(tmp_path) == [4, 6]
