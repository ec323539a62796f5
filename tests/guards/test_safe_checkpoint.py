"""SafeCheckpoint: what it saves and when, what it keeps, a run of NaN, a full disk, and the way back."""

import contextlib
import errno
import math
import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.models import Small, adamw
from harness.runs import On, trainer_with
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import ExactResume, SafeCheckpoint
from lightning_tricks.checkpoints import atomic_checkpoint_io, check_checkpoint
from lightning_tricks.checkpoints.record import KEY, Record, read_record, to_json
from lightning_tricks.checkpoints.snapshot import HostBuffers
from lightning_tricks.guards import checkpoint_folder
from lightning_tricks.guards.checkpoint_content import not_finite
from lightning_tricks.guards.checkpoint_folder import CheckpointFolder, Retention, move_last
from lightning_tricks.guards.safe_checkpoint import SaveClock


class Batches:
    """Batch i is a function of i; goes on where its state says, as a loader with index-addressed batches does."""

    def __init__(self, length: int = 1000, sized: bool = True) -> None:
        self.length, self.sized = length, sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError
        return self.length

    def __iter__(self) -> Any:
        torch.rand(1)  # as a DataLoader draws the seed of its workers
        return self.batches()

    def batches(self) -> Any:
        start = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        for i in range(start, self.length):
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(i))


class Model(Small):
    """Two layers with dropout; notes each loss with its batch and step. `val/loss` is best at step 6.

    Args:
        nan_from: the step from which the loss is NaN.
        optimizers: see `Small`.
    """

    def __init__(self, nan_from: int | None = None, optimizers: int = 1) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        super().__init__(net=net, optimizer=adamw, optimizers=optimizers)
        self.nan_from = nan_from

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        place = (self.trainer.fit_loop.total_batch_idx, self.trainer.global_step)
        loss = super().training_step(batch, batch_idx)
        self.losses[-1] = (*place, self.losses[-1])
        return loss

    def loss_of(self, batch: Any) -> Any:
        is_nan = self.nan_from is not None and self.trainer.global_step >= self.nan_from
        return super().loss_of(batch) * (math.nan if is_nan else 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        self.log("val/loss", abs(self.trainer.global_step - 6.0))


def fit(
    saver: Any, steps: int = 8, model: Any = None, loader: Any = None, ckpt_path: Any = None, **options: Any
) -> Any:
    """Train on one device, without validation unless it is asked for; returns (trainer, model)."""
    torch.manual_seed(0)
    model, loader = model or Model(), Batches() if loader is None else loader
    defaults = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "logger": False, "log_every_n_steps": 1}
    savers = saver if isinstance(saver, list) else [saver]
    trainer = loader.trainer = trainer_with(*savers, **{**defaults, "max_steps": steps, **options})
    trainer.fit(model, loader, DataLoader(torch.zeros(1, 3)), ckpt_path=ckpt_path)
    return trainer, model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def steps(folder: Path) -> list[int]:
    return sorted(read_record(path).step for path in folder.glob("step=*.ckpt"))


def every(steps: int, folder: Path, **options: Any) -> SafeCheckpoint:
    return SafeCheckpoint(folder, every_n_train_steps=steps, **options)


VALIDATION = {"limit_val_batches": 1, "check_val_every_n_epoch": None}


# ---- when it saves, and what it keeps


def test_the_newest_stay_and_last_is_a_relative_link_to_the_final_step(tmp_path):
    trainer, _ = fit(every(3, tmp_path), steps=10)
    assert names(tmp_path) == {"step=9.ckpt", "step=10.ckpt", "last.ckpt"}
    assert os.readlink(tmp_path / "last.ckpt") == "step=10.ckpt"
    assert trainer.checkpoint_callback.last_model_path == str(tmp_path / "last.ckpt")
    assert trainer.checkpoint_callback.best_model_path == str(tmp_path / "step=10.ckpt")
    assert read_record(tmp_path / "last.ckpt").finite is True
    assert len(trainer.checkpoint_callbacks) == 1  # Lightning adds none of its own


def test_a_save_in_the_background_finds_the_memory_for_the_model_ready(tmp_path, monkeypatch):
    fresh: dict[str, list[int]] = {}
    take = HostBuffers.take

    def noting(self: HostBuffers, size: int, locked: bool) -> Any:
        if not self._free.get((size, locked)):
            fresh.setdefault(threading.current_thread().name, []).append(size)
        return take(self, size, locked)

    monkeypatch.setattr(HostBuffers, "take", noting)
    fit([every(3, tmp_path / name, asynchronous=True) for name in "ab"], steps=7)
    weights = [4 * size for size in (3 * 8, 8, 8, 1)]
    of_model = sorted([*weights, *weights, *weights, *[4] * 4])  # weights, two moments of Adam, and its count of steps
    assert sorted(fresh.pop("checkpoint writer")) == of_model
    (others,) = fresh.values()  # in the main thread
    assert not {96, 32} & set(others)


def test_the_record_of_an_archive_is_read_once(tmp_path, monkeypatch):
    opened, real = [], checkpoint_folder.record_or_none

    def slow(path):  # so that the thread that writes and the main one often meet the same file
        opened.append(path.name)
        time.sleep(0.02)
        return real(path)

    monkeypatch.setattr(checkpoint_folder, "record_or_none", slow)
    fit(every(1, tmp_path, keep_last=3, asynchronous=True), steps=8)
    assert sorted(opened) == [f"step={step}.ckpt" for step in range(1, 9)]
    assert steps(tmp_path) == [6, 7, 8]
    fit(every(2, tmp_path, keep_last=3), steps=12, ckpt_path=tmp_path / "last.ckpt")
    assert sorted(opened[8:]) == [f"step={step}.ckpt" for step in (10, 12, 6, 7, 8)]
    assert steps(tmp_path) == [8, 10, 12]


def test_permanent_ones_stay(tmp_path):
    fit(every(3, tmp_path / "a", keep_last=1, permanent_steps=4), steps=10)
    assert steps(tmp_path / "a") == [4, 8, 10]
    fit(every(100, tmp_path / "b", keep_last=1, permanent_steps="powers_of_two"), steps=10)
    assert steps(tmp_path / "b") == [1, 2, 4, 8, 10]


def test_the_best_by_a_fresh_score_stays(tmp_path):
    saver = every(1, tmp_path, keep_last=1, monitor="val/loss")
    with pytest.warns(UserWarning, match="val/loss has no value for the weights of step 1"):
        fit(saver, steps=10, val_check_interval=2, **VALIDATION)
    assert steps(tmp_path) == [6, 10]
    assert saver.best_model_path == str(tmp_path / "step=6.ckpt")
    assert saver.best_model_score == 0
    scores = {record.step: record.score for record in map(read_record, tmp_path.glob("step*"))}
    assert scores == {6: 0.0, 10: 4.0}


def lines_of(*args: Any, raises: Any = (), **options: Any) -> list[str]:
    """The warnings of SafeCheckpoint in a fit, which may raise an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(raises):
            fit(*args, **options)
    return [str(warning.message) for warning in caught if str(warning.message).startswith("SafeCheckpoint: ")]


def test_a_metric_that_is_not_a_number_is_said_once(tmp_path):
    model, saver = Model(), every(2, tmp_path, monitor="val/loss")
    model.validation_step = lambda batch, batch_idx: model.log("val/loss", math.nan)
    assert lines_of(saver, model=model, val_check_interval=2, **VALIDATION) == [
        "SafeCheckpoint: val/loss is nan at step 2: such a checkpoint cannot be the best"
    ]


def test_a_metric_that_nobody_logs_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"monitor=val/los: the run logs no such metric; did you mean val/loss"):
        fit(every(2, tmp_path, monitor="val/los"), val_check_interval=2, **VALIDATION)


def test_without_an_interval_it_saves_after_validations_and_epochs(tmp_path):
    fit(SafeCheckpoint(tmp_path / "val", keep_last=9), steps=7, val_check_interval=3, **VALIDATION)
    assert steps(tmp_path / "val") == [3, 6, 7]
    fit(SafeCheckpoint(tmp_path / "epochs", keep_last=9), -1, loader=Batches(3), max_epochs=2)
    assert steps(tmp_path / "epochs") == [3, 6]


def test_a_save_comes_after_the_validation_that_is_due_and_at_the_end_of_a_window(tmp_path):
    seen = []

    def sees(trainer, pl_module, checkpoint):
        seen.append((trainer.global_step, trainer.fit_loop.total_batch_idx + 1, list(pl_module.validated)))

    savers = [every(1, tmp_path), On(on_save_checkpoint=sees)]
    fit(savers, steps=3, accumulate_grad_batches=4, val_check_interval=8, **VALIDATION)
    assert seen == [(1, 4, []), (2, 8, [2]), (3, 12, [2])]


def test_several_optimizers_are_counted_as_lightning_counts_them(tmp_path):
    # two steps a batch: 2, 4, 6, ...; the multiples of 3 are passed at 4, 6, 10, 12
    fit(every(3, tmp_path, keep_last=9), steps=12, model=Model(optimizers=2))
    assert steps(tmp_path) == [4, 6, 10, 12]


def test_minutes_are_asked_at_log_steps_on_rank_0(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(SaveClock, "minutes_are_over", lambda self: asked.append(1) or len(asked) == 2)
    fit(SafeCheckpoint(tmp_path, every_n_minutes=5), steps=9, log_every_n_steps=3)
    assert len(asked) == 3  # steps 3, 6, 9
    assert steps(tmp_path) == [6, 9]


def test_the_clock_counts_minutes_from_the_last_save(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = SaveClock(None, 2, None)
    clock.start(0)
    for seconds, over in ((119, False), (120, True), (500, True)):
        now[0] = seconds
        assert clock.minutes_are_over() is over
    clock.saved()
    assert not clock.minutes_are_over()


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"limit_val_batches": 1, "num_sanity_val_steps": 1}])
def test_neither_a_dry_run_nor_a_sanity_check_saves(tmp_path, options):
    seen = []
    sees = On(on_save_checkpoint=lambda trainer, *_: seen.append(trainer.sanity_checking))
    fit([SafeCheckpoint(tmp_path), sees], steps=2, **options)
    assert seen == ([] if "fast_dev_run" in options else [False])


def test_a_run_that_is_told_to_stop_or_ends_with_its_epochs_saves_its_last_step(tmp_path):
    stop = On(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == 5))
    fit([every(3, tmp_path / "stopped"), stop], steps=9)
    assert steps(tmp_path / "stopped") == [3, 5]
    loader = DataLoader(torch.ones(5, 3))
    fit(every(3, tmp_path / "epoch"), steps=-1, loader=loader, max_epochs=1)
    assert steps(tmp_path / "epoch") == [3, 5]


# ---- the folder


def test_files_of_others_are_not_touched(tmp_path):
    foreign = {"best.ckpt", "step=2.ckpt", "last.ckpt", "notes.txt"}
    for name in foreign:
        (tmp_path / name).write_text("theirs")
    fit(every(1, tmp_path, keep_last=1), steps=2)
    assert names(tmp_path) == foreign | {"step=2-v1.ckpt", "foreign-last.ckpt"}
    for name in foreign - {"last.ckpt"} | {"foreign-last.ckpt"}:
        assert (tmp_path / name).read_text() == "theirs"
    assert read_record(tmp_path / "last.ckpt").step == 2


def test_each_last_of_another_program_keeps_its_content_under_a_free_name(tmp_path):
    last, ours = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    ours.touch()
    for content in ("first", "second", "third"):
        last.unlink(missing_ok=True)
        last.write_text(content)
        move_last(ours)
        assert os.readlink(last) == "step=1.ckpt"
    found = [tmp_path / f"foreign-last{version}.ckpt" for version in ("", "-v1", "-v2")]
    assert [path.read_text() for path in found] == ["first", "second", "third"]


def saves_by_hand(path: Path, step: int, then: Any = lambda: None, **options: Any) -> Any:
    """A user who saves behind a step."""

    def save(trainer, *_):
        if trainer.global_step == step:
            trainer.save_checkpoint(path, **options)
            then()

    return On(on_train_batch_end=save)


@pytest.mark.parametrize("name", ["mine.ckpt", "step=2.ckpt"])
def test_a_save_by_the_user_stays_for_ever_also_over_one_of_ours(tmp_path, name):
    fit([saves_by_hand(tmp_path / name, 3), every(2, tmp_path, keep_last=1)])
    assert names(tmp_path) == {name, "step=8.ckpt", "last.ckpt"}
    assert read_record(tmp_path / name).permanent


def test_a_checkpoint_with_a_damaged_record_is_neither_counted_nor_deleted(tmp_path):
    fit(every(2, tmp_path), steps=2)
    damaged = tmp_path / "step=2.ckpt"
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(b'"number": 1', b'"number": 7'))
    assert damaged.read_bytes() != content
    fit(every(2, tmp_path, keep_last=1), steps=6)
    assert names(tmp_path) == {"step=2.ckpt", "step=6.ckpt", "last.ckpt"}
    assert read_record(tmp_path / "last.ckpt").number == 3


def test_going_back_to_an_earlier_step_keeps_the_newer_saves(tmp_path):
    fit(every(2, tmp_path, keep_last=4), steps=8)
    fit(every(2, tmp_path, keep_last=1), steps=4, ckpt_path=tmp_path / "step=2.ckpt")
    # the one that it went on from stays, and 6 and 8 of the older run were saved before 4
    assert steps(tmp_path) == [2, 4]
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"


def test_leftovers_are_swept_and_a_replaced_folder_gets_its_name_back(tmp_path):
    fit(every(2, tmp_path), steps=4)
    (tmp_path / ".step=6.ckpt.saving").write_bytes(b"half")
    (tmp_path / "step=2.ckpt").rename(tmp_path / ".step=2.ckpt.replaced")
    (tmp_path / ".step=4.ckpt.replaced").write_bytes(b"older")
    (tmp_path / "last.ckpt").unlink()
    theirs = {".hidden.txt", ".step=4.ckpt.swp"}
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    CheckpointFolder(tmp_path, Retention(2, 1, "min"), "run").sweep()
    assert names(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "last.ckpt", *theirs}
    assert read_record(tmp_path / "last.ckpt").step == 4


def no_links(*_, **__):
    raise OSError(errno.EPERM, "no links here")


def test_where_links_are_impossible_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "symlink", no_links)
    line = rf"={tmp_path}: last.ckpt must be a symbolic link, .* \(no links here\)"
    with pytest.raises(UsageError, match=line):
        fit(every(2, tmp_path), steps=4)


def test_a_disk_that_is_full_for_the_link_costs_neither_the_run_nor_the_checkpoint_to_which_it_leads(
    tmp_path, monkeypatch
):
    fit(every(2, tmp_path, keep_last=1), steps=2)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "symlink", full)
    with pytest.warns(UserWarning, match="last.ckpt links to an older checkpoint: No space left"):
        fit(every(2, tmp_path, keep_last=1), steps=4, ckpt_path=tmp_path / "last.ckpt")
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"
    assert names(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "last.ckpt"}


def test_a_folder_of_shards_is_linked_and_deleted_whole(tmp_path, monkeypatch):
    def make(step, number):
        path = tmp_path / f"step={step}.ckpt"
        path.mkdir()
        (path / "meta.pt").write_bytes(b"x")
        (path / "record.json").write_bytes(to_json(Record(step, number, True, run="run")))
        return path

    folder = CheckpointFolder(tmp_path, Retention(1, 0, "min"), "run")
    make(1, 1)
    folder.update()
    make(2, 2)
    deleted, real = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: deleted.append(path.name) or real(path))
    folder.update()
    assert names(tmp_path) == {"step=2.ckpt", "last.ckpt"}
    assert deleted == [".step=1.ckpt.saving"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"


def test_two_in_one_folder_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    own = {"default_root_dir": tmp_path}  # in which the folder of a saver without `dirpath` lies
    for other in (
        SafeCheckpoint(tmp_path / "checkpoints", monitor="a"),
        SafeCheckpoint(tmp_path / "link/checkpoints"),
        pl.callbacks.ModelCheckpoint(),
    ):
        for savers in ([SafeCheckpoint(), other], [other, SafeCheckpoint()]):
            with pytest.raises(UsageError, match=rf"another {type(other).__name__} saves to this folder too"):
                fit(savers, **own)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for dirpath in (tmp_path / "file", tmp_path / "file/checkpoints"):
        with pytest.raises(UsageError, match=rf"^SafeCheckpoint: dirpath={dirpath}: {tmp_path}/file is a file: give"):
            fit(SafeCheckpoint(dirpath))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UsageError, match=rf"this process may not write to {tmp_path}: give another folder$"):
        fit(SafeCheckpoint(tmp_path / "checkpoints"))


def test_a_trainer_of_the_other_package_is_refused():
    """It knows no checkpoint callback of this one."""
    with pytest.raises(UsageError, match="import pytorch_lightning before lightning_tricks, or set LIGHTNING_TRICKS"):
        SafeCheckpoint().setup(SimpleNamespace(checkpoint_callbacks=[]), Model(), "fit")


def test_loggers_hear_of_a_checkpoint_that_is_replaced_when_the_new_one_has_its_name(tmp_path, monkeypatch):
    fit(every(2, tmp_path, keep_last=9), steps=4)
    go_on, told = threading.Event(), []

    class Uploads(DummyLogger):
        def after_save_checkpoint(self, checkpoint_callback):
            told.append(read_record(tmp_path / "step=4.ckpt").number)

    goes_on = On(on_train_batch_start=lambda trainer, *_: go_on.set() if trainer.global_step == 5 else None)
    before_writes(monkeypatch, lambda path: go_on.wait())
    saver = every(2, tmp_path, keep_last=9, asynchronous=True)
    fit([saver, goes_on], steps=6, ckpt_path=tmp_path / "step=2.ckpt", logger=Uploads())
    assert set(told) == {3}  # 1 and 2 are of the first run


# ---- NaN


class Normalized(Model):
    """With batch normalization, one of whose running statistics is wrong from step 5 on; its mask is so by design."""

    def __init__(self, wrong: str, value: float) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(8))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.wrong, self.value = wrong, value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 5:
            self.get_buffer(self.wrong).fill_(self.value)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(nan_from=5),
        lambda: Normalized("net.1.running_mean", math.nan),
        lambda: Normalized("net.1.running_var", math.inf),
    ],
)
def test_a_run_of_nan_keeps_the_last_good_checkpoint_and_last_leads_to_it(tmp_path, make):
    (said,) = lines_of(every(2, tmp_path, keep_last=2), 12, make())
    assert said.startswith("SafeCheckpoint: at step 6 some weights or running statistics are NaN or infinite")
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"
    records = [read_record(path) for path in tmp_path.glob("step*")]
    assert {record.step: record.finite for record in records} == {4: True, 10: False, 12: False}


def test_a_checkpoint_of_nan_never_takes_the_place_of_a_good_one(tmp_path):
    fit(every(2, tmp_path, keep_last=9), steps=4)
    options = {"steps": 4, "ckpt_path": tmp_path / "step=2.ckpt"}
    fit(every(2, tmp_path, keep_last=9), model=Model(nan_from=2), **options)
    assert names(tmp_path) == {"step=2.ckpt", "step=4.ckpt", "step=4-not-finite.ckpt", "last.ckpt"}
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"


def test_one_number_among_all_weights_is_enough_and_large_ones_are_finite():
    ones = [
        torch.ones(3),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(0),
    ]
    assert not_finite(ones) == 0
    assert not_finite([torch.full((4,), 6e4, dtype=torch.float16), torch.full((4,), 3e38)]) == 0
    assert not_finite([torch.arange(3), torch.ones(4).to(torch.float8_e4m3fn)]) == 0
    assert not_finite([]) == 0
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not_finite([*ones, torch.tensor([1.0, wrong, 2.0])]) == 1
        assert not_finite([torch.tensor([1.0 + wrong * 1j]), *ones]) == 1


# ---- a full disk


def before_writes(monkeypatch, act: Any) -> None:
    """Have `act(path)` called before a checkpoint is written: it may wait, or raise an error."""
    real = atomic_checkpoint_io.write_file
    monkeypatch.setattr(atomic_checkpoint_io, "write_file", lambda content, path: (act(path), real(content, path)))


def refuse(number: int) -> Any:
    raise OSError(number, os.strerror(number))


def full_disk(monkeypatch, folder: Path, room: int, until: int = 10**9, number: int = errno.ENOSPC) -> list[str]:
    """Let a save fail while `room` checkpoints are there; returns what was tried."""
    tried = []

    def act(path):
        tried.append(path.name)
        if len(tried) < until and len(list(folder.glob("step=*.ckpt"))) >= room:
            refuse(number)

    before_writes(monkeypatch, act)
    return tried


def test_on_a_full_disk_the_next_to_go_goes_and_the_save_is_tried_again(tmp_path, monkeypatch):
    tried = full_disk(monkeypatch, tmp_path, room=2)
    with pytest.warns(UserWarning, match=r"step=6.ckpt: No space left on device: deleted step=2.ckpt to make room"):
        fit(every(2, tmp_path, keep_last=3), steps=6)
    assert tried == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=6.ckpt"]
    assert steps(tmp_path) == [4, 6]


@pytest.mark.parametrize(
    ("asynchronous", "number"), [(False, errno.ENOSPC), (True, errno.ENOSPC), (False, errno.EFBIG)]
)
def test_without_room_training_goes_on_and_the_next_save_tries_again(tmp_path, monkeypatch, asynchronous, number):
    tried = full_disk(monkeypatch, tmp_path, room=1, until=4, number=number)
    match = rf"step=4.ckpt was not saved: {os.strerror(number)}. Training continues.*newest checkpoint is .*step=2.ckpt"
    with pytest.warns(UserWarning, match=match):
        trainer, _ = fit(every(2, tmp_path, keep_last=3, asynchronous=asynchronous), steps=10)
    assert trainer.global_step == 10
    assert tried == [f"step={step}.ckpt" for step in (2, 4, 6, 8, 10)]
    assert steps(tmp_path) == [2, 8, 10]  # the only good one was never given for room
    assert os.readlink(tmp_path / "last.ckpt") == "step=10.ckpt"


def test_each_of_two_savers_does_without_what_its_own_disk_cannot_hold_and_other_saves_fail(tmp_path, monkeypatch):
    before_writes(monkeypatch, lambda path: path.parent == tmp_path / "a" or refuse(errno.ENOSPC))
    savers = [every(2, tmp_path / name) for name in ("a", "b")]
    assert lines_of([*savers, saves_by_hand(tmp_path / "mine.ckpt", 3)], raises=OSError) == [
        f"SafeCheckpoint: {tmp_path}/b/step=2.ckpt was not saved: No space left on device. Training continues, the "
        "next save tries again: free some space. There is no checkpoint yet"
    ]
    assert steps(tmp_path / "a") == [2], "the user's own save has ended the run"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_error_of_the_disk_ends_the_run_at_once_or_at_the_next_step(tmp_path, monkeypatch, asynchronous):
    before_writes(monkeypatch, lambda path: refuse(errno.EACCES))
    model, saver = Model(), every(2, tmp_path, asynchronous=asynchronous)
    with pytest.raises(OSError, match="Permission denied"):
        fit(saver, model=model, steps=1000)
    assert len(model.losses) == 2 if not asynchronous else 2 <= len(model.losses) < 1000


def test_a_write_that_fails_while_the_run_fails_is_told_and_hides_no_error(tmp_path, monkeypatch):
    failing = threading.Event()

    def fails(trainer, *_):
        if trainer.global_step == 2:
            failing.set()
            raise ValueError("bad batch")

    before_writes(monkeypatch, lambda path: failing.wait(60) and refuse(errno.EACCES))
    with (
        pytest.warns(UserWarning, match=r"^SafeCheckpoint: the last checkpoint was not saved: .*Permission denied"),
        pytest.raises(ValueError, match="bad batch"),
    ):
        fit([every(2, tmp_path, asynchronous=True), On(on_train_batch_start=fails)])


# ---- the way back


@pytest.mark.parametrize(("sized", "accumulate", "asynchronous"), [(True, 4, True), (False, 1, False)])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path, sized, accumulate, asynchronous):
    options = {"accumulate_grad_batches": accumulate, "val_check_interval": 2 * accumulate, **VALIDATION}

    def saver(name):
        return every(3, tmp_path / name, keep_last=9, asynchronous=asynchronous)

    _, whole = fit(saver("whole"), 12, loader=Batches(sized=sized), **options)
    for step, validated in ((3, [2]), (6, [2, 4, 6]), (9, [2, 4, 6, 8])):
        torch.manual_seed(77)
        resumed = Model()
        path = tmp_path / "whole" / f"step={step}.ckpt"
        fit(saver(f"from {step}"), 12, resumed, Batches(sized=sized), path, **options)
        assert resumed.losses == whole.losses[step * accumulate :]
        assert [p.tolist() for p in resumed.parameters()] == [p.tolist() for p in whole.parameters()]
        assert validated + resumed.validated == whole.validated == [2, 4, 6, 8, 10, 12]
        # it did not save again at once
        assert steps(tmp_path / f"from {step}") == [later for later in (6, 9, 12) if later > step]


@pytest.mark.parametrize("others", [[], [ExactResume]], ids=["alone", "ExactResume"])
def test_a_run_that_is_stopped_within_a_step_goes_on_from_that_steps_start(tmp_path, others):
    def stop(trainer, *args):
        trainer.should_stop |= args[-1] == 9

    def run(name, *callbacks, ckpt_path=None):
        savers = [*callbacks, *(other() for other in others), every(100, tmp_path / name)]
        loader = DataLoader(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), 2) if others else None
        module = Small(3, 4, 1, optimizer=adamw)
        return fit(savers, 5, module, loader, ckpt_path, accumulate_grad_batches=4)[1]

    whole = run("whole")
    run("stopped", On(on_train_batch_end=stop))  # with the second of the four micro-batches of a step
    assert steps(tmp_path / "stopped") == [2]
    resumed = run("resumed", ckpt_path=tmp_path / "stopped/last.ckpt")
    assert resumed.losses == whole.losses[8:]
    assert [p.tolist() for p in resumed.parameters()] == [p.tolist() for p in whole.parameters()]


def test_the_content_is_there_and_opens_safely(tmp_path):
    fit(every(2, tmp_path), steps=2)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    added = checkpoint[KEY]
    assert sorted(added) == ["module", "recipe", "record", "versions"]
    assert added["module"] == "Model"
    record = added["record"]
    assert len(record.pop("run")) == 32
    assert record == {"step": 2, "number": 1, "finite": True, "score": None, "permanent": False, "version": 1}
    assert sorted(added["versions"]) == ["lightning", "lightning_tricks", "python", "torch"]
    assert len(checkpoint["random_states"]) == 1
    assert check_checkpoint(tmp_path / "last.ckpt", resumes=True)


def test_a_checkpoint_of_another_class_is_one_line(tmp_path):
    fit(every(2, tmp_path), steps=2)

    class Other(Small):
        pass

    last = tmp_path / "last.ckpt"
    with pytest.raises(UsageError, match=r"a Model saved this checkpoint, and this run trains a Other.*--init_from"):
        fit(SafeCheckpoint(tmp_path), model=Other(3, 1), ckpt_path=last)
    assert steps(tmp_path) == [2]

    class Finer(Model):
        """A subclass may go on."""

    fit(SafeCheckpoint(tmp_path), steps=3, model=Finer(), ckpt_path=last)


def test_a_checkpoint_of_other_weights_names_the_first_key(tmp_path):
    fit(every(2, tmp_path), steps=2)
    model = Model()
    model.net.append(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"of another model than the recipe's Model: Missing key.*: \"net.3.weight\""):
        fit(SafeCheckpoint(tmp_path), model=model, ckpt_path=tmp_path / "last.ckpt")
    assert "load_state_dict" not in vars(model)  # what was replaced is back


def test_it_goes_on_from_a_checkpoint_of_lightnings_own_saver(tmp_path):
    fit(pl.callbacks.ModelCheckpoint(tmp_path / "theirs", filename="{step}"), steps=3)
    (theirs,) = (tmp_path / "theirs").glob("*.ckpt")
    _, model = fit(SafeCheckpoint(tmp_path / "ours"), steps=5, ckpt_path=theirs)
    assert [step for _, step, _ in model.losses] == [3, 4]
    assert steps(tmp_path / "ours") == [5]


def test_lightnings_last_and_best_lead_here_and_evaluating_them_leaves_the_best_the_best(tmp_path):
    saver = every(2, tmp_path, keep_last=1, monitor="val/loss")
    trainer, model = fit(saver, 10, val_check_interval=2, **VALIDATION)
    for name, step in (("best", 6), ("last", 10)):
        for evaluate in (trainer.validate, trainer.test, trainer.predict):
            evaluate(model, DataLoader(torch.zeros(1, 3)), ckpt_path=name)
            assert read_record(Path(trainer.ckpt_path)).step == step
            assert saver.best_model_path == str(tmp_path / "step=6.ckpt")
    trainer, _ = fit(every(2, tmp_path), 12, ckpt_path="last")
    assert trainer.global_step == 12


# ---- other CheckpointIOs


class Plain(pl.plugins.TorchCheckpointIO):
    """A user's own."""


@pytest.mark.parametrize("io", [Plain, pl.plugins.AsyncCheckpointIO])
def test_another_checkpoint_io_is_refused(tmp_path, io):
    with pytest.raises(UsageError, match=rf"^plugins={io.__name__}: .* leave the plugin out \(.*asynchronous=True"):
        fit(SafeCheckpoint(tmp_path), plugins=[io()])
