"""The parts of Preemption: whose signals they are, when a job ends, who is asked to run it again."""

import errno
import math
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from harness.models import Small
from harness.processes import run
from harness.runs import On, trainer_with
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_tricks import ExactResume, Preemption, SafeCheckpoint
from lightning_tricks._host.process import process_age
from lightning_tricks.checkpoints import atomic_checkpoint_io
from lightning_tricks.checkpoints.check_checkpoint import identity
from lightning_tricks.guards import stop_signals
from lightning_tricks.guards.preemption import Agreement, Preempted
from lightning_tricks.guards.stop_signals import (
    Reason,
    StopSignals,
    deadline,
    job_id,
    requeue,
    seconds_left_in_job,
    shielded_workers,
)

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


class Model(Small):
    """Calls `then` in its third step, and counts the epochs that have ended."""

    def __init__(self, then=lambda: None):
        super().__init__(2, 1, logs=True)
        self.then = then
        self.register_buffer("ended", torch.zeros(()))

    def on_train_epoch_end(self):
        self.ended += 1

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.then()
        return super().training_step(batch, batch_idx)


class ByHand(Model):
    """Makes an optimizer step of every three batches, or none from the second step on."""

    def __init__(self, then, stops=False):
        super().__init__(then)
        self.automatic_optimization, self.stops = False, stops

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            self.then()
        self.manual_backward(self.loss_of(batch))
        if batch_idx % 3 == 2 and not (self.stops and self.trainer.global_step):
            self.optimizers().step()
            self.optimizers().zero_grad()


def fit(folder, act, *callbacks, preemption=None, ckpt_path=None, model=None, **options):
    """The exception with which a fit of 6 steps ends, None if it comes to its end."""
    warnings.simplefilter("ignore")
    own = {"max_steps": 6, "logger": False, "default_root_dir": folder, "enable_checkpointing": bool(callbacks)}
    trainer = trainer_with(preemption or Preemption(), *callbacks, **{**own, **options})
    try:
        trainer.fit(model or Model(act), ckpt_path=ckpt_path)
    except BaseException as error:
        return error.with_traceback(None)
    return None


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_exit_code_is_that_of_the_option(tmp_path, number):
    stop = fit(tmp_path, lambda: os.kill(os.getpid(), number), preemption=Preemption(exit_code=0))
    assert (type(stop), stop.code, stop.step) == (Preempted, 0, 3)


def test_without_a_checkpoint_callback_the_checkpoint_is_in_the_root_folder(tmp_path, capfd):
    stop = fit(tmp_path, terminate)
    assert stop.checkpoint == str(tmp_path / "last.ckpt")
    assert f"Stopped by SIGTERM after step 3: {tmp_path / 'last.ckpt'}" in capfd.readouterr().err
    assert step_of(tmp_path / "last.ckpt") == 3
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["last.ckpt"]


def test_into_a_bucket_the_checkpoint_is_written_under_its_name_at_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = f"memory://{tmp_path.name}"  # there is no rename in a bucket
    stop = fit(folder, terminate)
    assert stop.checkpoint == f"{folder}/last.ckpt"
    assert f"Stopped by SIGTERM after step 3: {folder}/last.ckpt" in capfd.readouterr().err
    bucket = fsspec.filesystem("memory")
    assert [Path(path).name for path in bucket.find(f"/{tmp_path.name}")] == ["last.ckpt"]
    with bucket.open(f"/{tmp_path.name}/last.ckpt") as file:
        assert step_of(file) == 3


def test_an_older_checkpoint_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    fit(tmp_path, terminate, ModelCheckpoint(tmp_path))
    last = tmp_path / "last.ckpt"
    before = identity(last)
    real = pl.Trainer.save_checkpoint

    def half(self, filepath, *args, **kwargs):
        assert identity(last) == before
        real(self, filepath, *args, **kwargs)
        assert identity(last) == before

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", half)
    fit(tmp_path, terminate, ModelCheckpoint(tmp_path, save_top_k=0), max_epochs=None)
    assert step_of(tmp_path / "last.ckpt") == 3
    assert identity(last) != before


def test_a_save_in_the_background_has_its_name_before_the_process_leaves(tmp_path):
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            time.sleep(0.5)
            super().save_checkpoint(*args, **kwargs)

    stop = fit(tmp_path, terminate, ModelCheckpoint(tmp_path, save_top_k=0), plugins=[AsyncCheckpointIO(Slow())])
    assert isinstance(stop, Preempted)
    assert step_of(tmp_path / "last.ckpt") == 3


def test_a_callback_that_saves_by_itself_is_asked_to(tmp_path):
    class Safe(pl.callbacks.Checkpoint):
        def save_now(self, trainer):
            trainer.save_checkpoint(tmp_path / "safe.ckpt")
            return tmp_path / "safe.ckpt"

    stop = fit(tmp_path, terminate, Safe())
    assert stop.checkpoint == str(tmp_path / "safe.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["safe.ckpt"]


@pytest.mark.parametrize("cause", ["full disk", "NaN"])
def test_a_step_without_a_checkpoint_is_said_and_the_step_that_the_named_checkpoint_holds(
    tmp_path, monkeypatch, capfd, cause
):
    def spoils(trainer, pl_module, loss):
        if trainer.global_step == 2 and cause == "NaN":
            pl_module.net[0].weight.data.fill_(math.nan)
        elif trainer.global_step == 2:
            monkeypatch.setattr(atomic_checkpoint_io, "write_file", full)

    stop = fit(tmp_path, terminate, SafeCheckpoint(tmp_path, every_n_train_steps=2), On(on_before_backward=spoils))
    last = tmp_path / "last.ckpt"
    assert (stop.step, stop.checkpoint, step_of(last)) == (3, str(last), 2)
    line = f"Stopped by SIGTERM after step 3, of which no checkpoint to go on from was saved: {last} is of step 2\n"
    assert line in capfd.readouterr().err


def test_it_saves_what_every_other_callback_has_done_in_the_step(tmp_path):
    done = []
    counts = On(on_train_batch_end=lambda *_: done.append(1), state_dict=lambda: {"steps": len(done)})
    fit(tmp_path, terminate, counts, enable_checkpointing=False)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][counts.state_key] == {"steps": 3}


SAVERS = {
    "alone": lambda folder: [],
    "beside ExactResume": lambda folder: [ExactResume()],
    "by SafeCheckpoint": lambda folder: [ExactResume(), SafeCheckpoint(folder, every_n_train_steps=3)],
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("stops_early", [True, False])
def test_in_an_epochs_last_step_it_saves_what_the_hooks_of_the_epochs_end_have_done(tmp_path, saver, stops_early):
    def epochs(act, ckpt_path=None):
        """Run up to three epochs of three steps, in which a metric never gets better."""
        early = EarlyStopping("train/loss", min_delta=1e9, patience=9)
        callbacks = [*SAVERS[saver](tmp_path), *[early] * stops_early]
        saves = any(isinstance(callback, SafeCheckpoint) for callback in callbacks)
        options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 3, "enable_checkpointing": saves}
        return fit(tmp_path, act, *callbacks, ckpt_path=ckpt_path, **options), early

    stop, _ = epochs(terminate)
    assert (stop.code, stop.step) == (143, 3)
    saved = torch.load(stop.checkpoint, weights_only=False)
    assert (saved["global_step"], saved["state_dict"]["ended"]) == (3, 1)
    error, early = epochs(lambda: None, stop.checkpoint)
    assert error is None
    assert early.wait_count == 2 * stops_early


@pytest.mark.parametrize(("stops", "step"), [(False, 2), (True, 1)])
def test_a_step_by_hand_is_finished_unless_it_takes_more_batches_than_any_before(tmp_path, stops, step):
    stop = fit(tmp_path, None, model=ByHand(terminate, stops))
    assert (stop.step, step_of(stop.checkpoint)) == (step, step)
    saved = torch.load(stop.checkpoint, weights_only=True)["loops"]["fit_loop"]
    assert saved["epoch_loop.batch_progress"]["current"]["processed"] == 6


def test_a_run_that_was_stopped_before_its_first_step_begins_beside_exact_resume(tmp_path):
    stop = fit(tmp_path, None, On(setup=lambda *_, **__: terminate()), ExactResume(), enable_checkpointing=False)
    assert (stop.code, stop.step) == (143, 0)
    assert fit(tmp_path, lambda: None, ExactResume(), ckpt_path=stop.checkpoint, enable_checkpointing=False) is None


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    seen = []

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # of the launcher: too early to be a second one
        seen.append("still here")
        monkeypatch.setattr(stop_signals, "SECOND_CTRL_C_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("not reached")

    before = handlers()
    stop = fit(tmp_path, twice)
    assert (type(stop), stop.code) == (SystemExit, 1)  # what Lightning makes of a KeyboardInterrupt
    assert seen == ["still here"]
    assert list(tmp_path.iterdir()) == []
    assert handlers() == before


def test_handlers_are_put_back_after_an_exception_and_after_the_end(tmp_path):
    before, during = handlers(), []

    def fail():
        during.append(handlers())
        raise RuntimeError("power cut")

    assert isinstance(fit(tmp_path, fail), RuntimeError)
    assert handlers() == before
    assert fit(tmp_path, lambda: during.append(handlers())) is None
    assert handlers() == before
    assert all(now != then for seen in during for now, then in zip(seen, before, strict=True))


def test_while_it_leaves_signals_are_of_no_effect_until_the_program_has_caught_it(tmp_path):
    before = handlers()
    stop = fit(tmp_path, terminate)
    assert handlers() != before
    terminate()
    del stop
    assert handlers() == before


def test_lightnings_own_handlers_and_its_broadcast_are_back_after_the_fit(tmp_path):
    trainer = trainer_with(Preemption(), max_steps=1, default_root_dir=tmp_path)
    owners = [trainer._signal_connector, trainer.fit_loop.epoch_loop]
    before = [dict(vars(owner)) for owner in owners]
    trainer.fit(Model())
    assert [vars(owner).keys() for owner in owners] == [known.keys() for known in before]


def test_handlers_that_others_have_installed_or_ignore_are_left_alone():
    before = handlers()
    try:
        signal.signal(signal.SIGUSR1, theirs := lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours = StopSignals(
            {signal.SIGUSR1: Reason.REQUEUE, signal.SIGINT: Reason.CTRL_C, signal.SIGTERM: Reason.SIGTERM}
        )
        ours.install()
        assert handlers()[1:] == [theirs, signal.SIG_IGN]
        signal.signal(signal.SIGTERM, theirs)
        ours.restore()
        assert handlers()[0] is theirs
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            signal.signal(number, handler)


def test_outside_the_main_thread_it_only_knows_the_time(tmp_path):
    before, ended = handlers(), []

    def work():
        preemption = Preemption()

        def act():
            ended.append(handlers())
            preemption.deadline = 0.0

        ended.append(fit(tmp_path, act, preemption=preemption))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended[0] == before
    assert isinstance(ended[1], Preempted)


@pytest.mark.long
@pytest.mark.parametrize("number", NUMBERS)
def test_a_forked_process_acts_as_without_the_handlers(number):
    # a fit that failed in an earlier test may have left Lightning's handler
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    ours = StopSignals(dict.fromkeys(NUMBERS, Reason.SIGTERM))
    ours.install()
    try:
        if (child := os.fork()) == 0:
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        ours.restore()
        signal.signal(number, before)
    assert code == (7 if number == signal.SIGINT else -number)
    assert ours.received is Reason.NONE


@pytest.mark.long
@pytest.mark.parametrize(
    ("context", "kind"), [("fork", DataLoader), ("spawn", DataLoader), ("fork", StatefulDataLoader)]
)
def test_loader_workers_outlive_signals_that_are_not_their_loaders(context, kind):
    with shielded_workers():
        batches = iter(kind(range(8), batch_size=None, num_workers=1, multiprocessing_context=context))
        (worker,) = batches._workers
        assert next(batches) == 0
        for number in NUMBERS:
            subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
        assert list(batches) == list(range(1, 8))
        assert worker.exitcode in (None, 0)


@pytest.mark.long
def test_a_worker_that_hangs_ends_with_its_loader():
    with shielded_workers():
        loader = iter(DataLoader(range(8), batch_size=None, num_workers=1, multiprocessing_context="fork"))
        next(loader)
        (worker,) = loader._workers
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == 0


def test_max_minutes_is_a_moment_after_the_start(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert deadline(None, 5.0) == math.inf
    assert deadline(2.0, 5.0) == pytest.approx(time.monotonic() - process_age() + 120, abs=0.1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 4000))
    assert deadline(None, 5.0) == pytest.approx(time.monotonic() + 4000 - 300, abs=5)
    assert deadline(1e-9, 5.0) < time.monotonic()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, math.inf),
        ({"SLURM_JOB_END_TIME": "soon"}, math.inf),
        ({"SLURM_JOB_END_TIME": "10000"}, 10000 - 300 - 1000),
        ({"SLURM_JOB_END_TIME": "10000", "SLURM_JOB_START_TIME": "0"}, 10000 - 300 - 1000),
        ({"SLURM_JOB_END_TIME": "2000", "SLURM_JOB_START_TIME": "0"}, 2000 - 200 - 1000),  # a tenth of a short job
    ],
)
def test_the_end_of_a_slurm_job_less_a_margin(environment, expected):
    assert seconds_left_in_job(environment, 5.0, now=1000.0) == expected


def test_the_id_of_a_job():
    array = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
    found = [job_id(environment) for environment in ({}, {"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "12", **array})]
    assert found == [None, "12", "10_3"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A job of one task in SLURM, whose `scontrol` writes down how it was called."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name, value in {"NTASKS": 1, "JOB_ID": 12, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    (tmp_path / "root").mkdir()
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "asked"),
    [("SIGUSR1", 143, True), ("deadline", 143, True), ("SIGTERM", 143, False), ("SIGINT", 130, False)],
)
def test_on_slurm_a_job_whose_time_is_over_is_requeued_and_a_cancelled_one_is_not(slurm, capfd, how, code, asked):
    preemption = Preemption()

    def act():
        if how == "deadline":
            preemption.deadline = 0.0
        else:
            os.kill(os.getpid(), getattr(signal, how))

    root = slurm / "root"
    stop = fit(root, act, ModelCheckpoint(root / "checkpoints"), preemption=preemption)
    assert (type(stop), stop.code, stop.step) == (Preempted, code, 3)
    called = (slurm / "called").read_text() if (slurm / "called").exists() else ""
    assert called == ("requeue 12\n" if asked else "")
    assert ("SLURM job 12 is requeued" in capfd.readouterr().err) == asked
    real = [path for path in root.rglob("*.ckpt") if not path.is_symlink()]
    assert real == [root / "checkpoints" / "last.ckpt"]
    assert step_of(real[0]) == 3
    link = root / "hpc_ckpt_1.ckpt"  # from which Lightning goes on when it is started again
    assert link.exists() == (how != "SIGINT")
    if how != "SIGINT":
        assert link.resolve() == real[0]
        steps = []
        del stop
        assert fit(root, lambda: steps.append(1), ModelCheckpoint(root / "checkpoints", save_top_k=0)) is None
        assert steps == []  # the third step is done


def test_on_slurm_a_run_from_a_checkpoint_of_its_own_choice_gets_no_link(slurm):
    """It would choose again, and Lightning prefers the link."""
    root = slurm / "root"
    saver = ModelCheckpoint(slurm / "first", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(slurm / "first", lambda: None, saver)
    stop = fit(root, terminate, ModelCheckpoint(root), ckpt_path=slurm / "first/step=2.ckpt")
    assert (stop.step, stop.checkpoint) == (3, str(root / "last.ckpt"))
    assert list(root.glob("hpc_ckpt_*")) == []


@pytest.mark.long
def test_without_scontrol_it_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue("12") == "SLURM job 12 is not requeued (No such file or directory): scontrol requeue 12"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho slurm_requeue: Requested operation is disabled >&2\nexit 1\n")
    scontrol.chmod(0o700)
    line = "SLURM job 12 is not requeued (slurm_requeue: Requested operation is disabled): scontrol requeue 12"
    assert requeue("12") == line


def agree(rank):
    torch.distributed.init_process_group("gloo")
    ranks = Agreement(2)
    assert ranks.later(0) == 0
    assert ranks.later(rank) == 0  # of the call before
    assert ranks.later(0) == 1
    assert ranks.now(0) == 0
    assert ranks.later(2 * rank) == 0
    assert ranks.now(0) == 2  # it gave that to the call before
    assert ranks.now(3 - rank) == 3
    ranks.later(1)
    ranks.close()
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_ranks_agree_on_the_largest_number_one_call_later():
    run(agree)


def test_no_part_of_it_is_there_in_a_development_run(tmp_path):
    seen = []
    before = handlers()
    trainer_with(Preemption(), fast_dev_run=3, logger=False).fit(Model(lambda: seen.append(handlers()[1:])))
    assert seen == [before[1:]]


def test_processes_that_cannot_agree_are_told_that_it_stays_off(recwarn):
    before, callback = handlers(), Preemption()
    callback.setup(SimpleNamespace(world_size=2, fast_dev_run=False), None, "fit")
    callback.on_train_start(None, None)
    assert handlers() == before
    lines = [str(warned.message) for warned in recwarn]
    assert lines == ["Preemption stays off: the processes have no torch.distributed to agree by"]
