"""Where a run's wall time went: by hand with a clock of our own, over a kill and a resume, and in a real short run."""

import json
import math
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.runs import Memory, On
from harness.runs import trainer_with as quiet_trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks.callbacks import GoodputMonitor, MetricBuffer, SafeCheckpoint, StepGuard
from lightning_tricks.monitors import _clock, goodput_monitor
from lightning_tricks.monitors._clock import DeviceWait
from lightning_tricks.monitors.goodput_monitor import (
    PARTS,
    SKIPPED,
    breakdown,
    covered,
    duration,
    fractions,
    lost_to_restart,
    newly_skipped,
    tenths_of_percent,
)

AGE = 10.0  # seconds of each process before its first fit


class Clock(runs.Clock):
    """Serves as the steady clock and as the time of day."""

    def rule(self, setattr=setattr):
        setattr(_clock, "clock", self)
        setattr(goodput_monitor, "wall_clock", self)
        setattr(goodput_monitor, "process_age", lambda: AGE)
        setattr(goodput_monitor, "_has_fitted", False)
        return self


@pytest.fixture
def clock(monkeypatch):
    return Clock().rule(monkeypatch.setattr)


class Data(torch.utils.data.Dataset):
    """Each batch takes a second."""

    def __init__(self, clock, batches=20):
        self.clock, self.batches = clock, batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        if index >= self.batches:
            raise IndexError
        self.clock.now += 1.0
        return torch.ones(2)


class Stream(IterableDataset):
    """The same without a length, so that Lightning fetches a batch ahead."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Net(pl.LightningModule):
    """5 seconds of set-up, 2 a micro-batch, 7 a batch of validation."""

    def __init__(self, clock):
        super().__init__()
        self.layer, self.clock = torch.nn.Linear(2, 1), clock

    def setup(self, stage):
        self.clock.now += 5.0

    def training_step(self, batch, batch_idx):
        self.clock.now += 2.0
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 7.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowDisk(TorchCheckpointIO):
    """A save takes 3 seconds."""

    def __init__(self, clock):
        self.clock = clock

    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        self.clock.now += 3.0


def spends(clock, **seconds):
    """Lets time pass in hooks."""
    return On(
        **{hook: lambda *_, spent=spent: setattr(clock, "now", clock.now + spent) for hook, spent in seconds.items()}
    )


class Log(Memory):
    def last(self):
        found = {}
        for _, values in self.rows:
            found.update({name[8:]: value for name, value in values.items() if name.startswith("goodput/")})
        return found


def trainer_with(clock, monitor, *callbacks, **options):
    defaults = {"max_steps": 6, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    defaults |= {"logger": Log(), "plugins": [SlowDisk(clock)]}
    return quiet_trainer(monitor, *callbacks, **{**defaults, **options})


def fit(clock, monitor=None, *callbacks, data=None, ckpt_path=None, **options):
    monitor = monitor or GoodputMonitor()
    trainer = trainer_with(clock, monitor, *callbacks, **options)
    loader = DataLoader(data or Data(clock), batch_size=None)
    trainer.fit(Net(clock), loader, DataLoader(torch.ones(8, 2)), ckpt_path=ckpt_path)
    return monitor, trainer


def raises(step, error=None):
    """Before the batch after `step` steps."""

    def on_train_batch_start(trainer, *_):
        if trainer.global_step == step:
            raise error or RuntimeError("power cut")

    return On(on_train_batch_start=on_train_batch_start)


def save_every(steps, folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1)


def spent(monitor):
    """The parts that have any time."""
    return {part: seconds for part, seconds in monitor.seconds.items() if abs(seconds) > 1e-6}


def breakdowns(caplog):
    return [r.message.removeprefix("GoodputMonitor: ") for r in caplog.records if "GoodputMonitor: " in r.message]


# ------------------------------------------------------------------------------------------------------- the arithmetic

TIMES = st.floats(0, 1e6)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=5)


def test_intervals_that_overlap_count_once():
    # 10-20 and 15-30 are 20 seconds; 40-50 is cut at 45, 0-5 lies before
    assert covered([(40, 50), (15, 30), (10, 20), (0, 5), (12, 13)], 8, 45) == 25
    assert covered([(10, 20)], 15, 12) == 0
    assert covered([], 0, 10) == 0


def test_what_a_restart_costs_by_hand():
    # saved at 100, which took until 103; killed at 160; from 170 to 200 again, without a save; started at 230
    processes, saves = [(0, 160), (170, 200)], [(50, 52), (99, 103), (120, 124)]
    assert lost_to_restart(100, 230, processes, saves) == {"checkpoint": 3, "lost": 57 + 30, "down": 10 + 30}
    # going on from the checkpoint of 120 takes the rest of its save alone
    assert lost_to_restart(121, 230, processes, saves) == {"checkpoint": 3, "lost": 36 + 30, "down": 40}


def test_a_process_that_started_before_the_save_has_lost_nothing():
    assert lost_to_restart(100, 90, [(0, 200)], [(99, 103)]) == {"checkpoint": 0, "lost": 0, "down": 0}


@given(TIMES, TIMES, INTERVALS, INTERVALS)
def test_what_is_lost_adds_up_to_the_time_since_the_save(saved_at, started_at, processes, saves):
    found = lost_to_restart(saved_at, started_at, processes, saves)
    assert math.fsum(found.values()) == pytest.approx(max(started_at - saved_at, 0.0), abs=1e-6)
    assert min(found.values()) >= -1e-6


@given(st.lists(st.floats(0, 1e7), min_size=len(PARTS), max_size=len(PARTS)))
def test_shares_add_up(values):
    seconds = dict(zip(PARTS, values, strict=True))
    if math.fsum(values) < 1e-6:
        return
    assert math.fsum(fractions(seconds).values()) == pytest.approx(1.0, abs=1e-12)
    found = tenths_of_percent(seconds)
    assert sum(found.values()) == 1000
    assert all(abs(found[part] - 1000 * share) < 1 + 1e-9 for part, share in fractions(seconds).items())


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        # 11520 seconds: three parts of 1/3 of 9.9 % round to 3.3 % each
        (
            {"steps": 10380, "validation": 380, "lost": 380, "down": 380, "data": 0.5},
            "wall 3 h 12 min = steps 90.1 % + validation 3.3 % + lost work 3.3 % + down time 3.3 % + other 0.0 %",
        ),
        ({"steps": 1, "data": 1, "other": 1}, "wall 3.0 s = steps 33.4 % + data wait 33.3 % + other 33.3 %"),
        ({}, "wall 0.0 s = steps 0.0 % + other 0.0 %"),
    ],
)
def test_a_breakdown_by_hand(seconds, line):
    assert breakdown(dict.fromkeys(PARTS, 0.0) | seconds) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (5.34, "5.3 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (61, "1 min 1 s"),
        (3599.4, "59 min 59 s"), (3599.6, "1 h 0 min"), (11520, "3 h 12 min"), (86369, "23 h 59 min"),
        (86371, "1 d 0 h"), (200000, "2 d 8 h"),
    ],
)  # fmt: skip
def test_a_time_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------------- worked by hand


def test_a_run_by_hand_adds_up(clock, tmp_path, caplog):
    others = spends(clock, on_validation_end=4.0, on_train_epoch_end=0.5, on_train_end=1.0)
    with caplog.at_level("INFO"):
        monitor, _ = fit(
            clock, None, others, save_every(3, tmp_path), limit_val_batches=2, val_check_interval=4,
            num_sanity_val_steps=1,
        )  # fmt: skip
    by_hand = {
        "setup": AGE + 5 + 7 + 1 + 2,  # the module's, the sanity check, the first batch and the first step
        "steps": 5 * 2,
        "data": 5 * 1,
        "validation": 2 * 7 + 4,  # with what callbacks do at its end
        "checkpoint": 2 * 3,
        "other": 0.5 + 1,
    }
    # the sanity check ends with the same hook
    by_hand["setup"] += 4
    assert spent(monitor) == pytest.approx(by_hand)
    assert sum(by_hand.values()) == clock.now - 1000 + AGE  # the wall time, from the start of the process
    assert breakdowns(caplog) == [
        "wall 1 min 10 s = steps 14.4 % + validation 25.9 % + checkpoints 8.6 % + data wait 7.2 % + set-up 41.7 % + "
        "other 2.2 %"
    ]


def test_the_logged_fractions_add_up_at_each_log_step(clock, tmp_path):
    _, trainer = fit(clock, None, save_every(3, tmp_path))
    rows = [(step, values) for step, values in trainer.logger.rows if "goodput/steps" in values]
    # after the save at step 3, the rows of steps 4 and 6; the second save comes after the last one
    assert [step for step, _ in rows] == [1, 2, 3, 5]
    for _, values in rows:
        shares = {name[8:]: value for name, value in values.items() if name != "goodput/wall_seconds"}
        assert list(shares) == list(PARTS)
        assert math.fsum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    found = trainer.logger.last()
    assert found["wall_seconds"] == pytest.approx(AGE + 5 + 6 * 3 + 3)
    assert found["steps"] == pytest.approx(10 / 36)
    assert float(trainer.callback_metrics["goodput/checkpoint"]) == pytest.approx(3 / 36)


def test_micro_batches_of_the_first_step_are_set_up(clock):
    monitor, _ = fit(clock, accumulate_grad_batches=2, max_steps=3)
    assert spent(monitor) == pytest.approx({"setup": AGE + 5 + 2 * 3, "steps": 4 * 2, "data": 4})


@pytest.mark.parametrize("wrap", [lambda data: data, Stream])
def test_each_epoch_waits_for_its_first_batch(clock, wrap):
    monitor, _ = fit(clock, data=wrap(Data(clock, 3)), max_steps=-1, max_epochs=2)
    assert spent(monitor) == pytest.approx(
        {"setup": AGE + 5 + 3 + (wrap is Stream), "steps": 10, "data": 5 - (wrap is Stream)}
    )


def test_compilations_are_apart_from_the_steps_that_they_stop(clock):
    def compiler(graph, inputs):
        clock.now += 20.0
        return graph.forward

    class Compiled(Net):
        def __init__(self, clock):
            super().__init__(clock)
            self.run = torch.compile(lambda x: self.layer(x).square().mean(), backend=compiler)

        def training_step(self, batch, batch_idx):
            self.clock.now += 2.0
            return self.run(batch)

    torch._dynamo.reset()
    monitor = GoodputMonitor()
    trainer_with(clock, monitor).fit(Compiled(clock), DataLoader(Data(clock), batch_size=None))
    assert spent(monitor) == pytest.approx({"setup": AGE + 5 + 3, "compile": 20, "steps": 10, "data": 5})


class InBackground(SlowDisk):
    """The disk needs 30 seconds more, for which somebody may wait."""

    def wait(self):
        self.clock.now += 30.0


def wait_at_the_end(trainer, pl_module):
    """As SafeCheckpoint does."""
    trainer.strategy.checkpoint_io.wait()


def test_a_wait_for_what_is_written_in_the_background_is_a_checkpoints(clock, tmp_path):
    waits = On(on_train_end=wait_at_the_end)
    monitor, trainer = fit(clock, None, waits, save_every(3, tmp_path), plugins=[InBackground(clock)])
    assert spent(monitor) == pytest.approx({"setup": 18, "steps": 10, "data": 5, "checkpoint": 6 + 30})
    assert "wait" not in vars(trainer.strategy.checkpoint_io)


# ------------------------------------------------------------------------------------------------------------- restarts


def process(rank, folder, started_at, ckpt_path, kill_at):
    """One process of a run that saves every 4 steps; it starts at a time of day."""
    clock = Clock(started_at + AGE).rule()

    def kill(trainer, *_):  # in a step, before it changes anything
        if trainer.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"ckpt_path": ckpt_path, "max_steps": 12}
    monitor, _ = fit(clock, None, save_every(4, folder), On(on_before_optimizer_step=kill), **options)
    return monitor.seconds, clock.now


def killed(*args):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        processes.run(process, *args, world=1)


@pytest.mark.long
def test_two_kills_and_a_resume_lose_no_second(tmp_path):
    checkpoint = tmp_path / "step=4.ckpt"
    # set-up 10 + 5 + 3 until 1018; steps 2 to 4 until 1027, a save until 1030; steps 5 and 6 until 1036; the batch and
    # the step of the kill until 1039
    killed(tmp_path, 1000.0, None, 6)
    file = json.loads((tmp_path / "goodput.json").read_text())
    assert file["processes"] == [[1000.0, 1030.0]]  # with the save; the log step at 1036 came within ten seconds
    assert file["saves"] == [[1027.0, 1030.0]]
    # a process that goes on from step 4 and is killed in its second step, before it logs or saves
    killed(tmp_path, 2000.0, checkpoint, 5)
    file = json.loads((tmp_path / "goodput.json").read_text())
    assert file["processes"] == [[1000.0, 1030.0], [2000.0, 2015.0]]  # its start, when it took over
    ((seconds, now),) = processes.run(process, tmp_path, 3000.0, checkpoint, None, world=1)
    by_hand = {
        "setup": (AGE + 5 + 3) + (AGE + 5 + 3),  # that of the process in between is lost
        "steps": 3 * 2 + 7 * 2,
        "data": 3 + 7,
        "checkpoint": 3 + 2 * 3,
        "lost": 15,  # what is known of the process in between; all of the first was saved
        "down": 2000 - 1030 + 3000 - 2015,
    }
    assert {part: spent for part, spent in seconds.items() if abs(spent) > 1e-6} == pytest.approx(by_hand)
    assert sum(by_hand.values()) == pytest.approx(now - 1000)  # since the very first start


def test_steps_after_the_last_save_are_lost_to_a_restart(clock, tmp_path):
    monitor = GoodputMonitor()
    with pytest.raises(RuntimeError, match="power cut"):
        fit(clock, monitor, raises(9), save_every(6, tmp_path), max_steps=12)
    before = spent(monitor)
    assert before == pytest.approx({"setup": 18, "steps": 8 * 2, "data": 9, "checkpoint": 3})
    clock.now += 100.0
    monitor, trainer = fit(clock, None, save_every(6, tmp_path), max_steps=12, ckpt_path=tmp_path / "step=6.ckpt")
    # steps 7 to 9 and the wait for the tenth batch are lost; the process has fitted before, so it has no age
    by_hand = {"setup": 18 + 8, "steps": 5 * 2 + 5 * 2, "data": 10, "checkpoint": 6, "lost": 10, "down": 100}
    assert spent(monitor) == pytest.approx(by_hand)
    assert sum(by_hand.values()) == clock.now - 1000 + AGE
    assert trainer.logger.last()["lost"] == pytest.approx(10 / (sum(by_hand.values()) - 3))  # before the last save


FOUND = ["a moved folder", "moved checkpoints"]


@pytest.mark.parametrize("damage", ["no file", "half a file", "another run's file", *FOUND])
def test_without_its_file_a_run_knows_how_much_was_lost_but_not_to_what(clock, tmp_path, damage):
    folder = tmp_path / "run/checkpoints"
    fit(clock, None, save_every(3, folder), max_steps=5)
    clock.now += 100.0
    assert {path.name for path in folder.iterdir()} == {"step=3.ckpt"}
    file = tmp_path / "run/goodput.json"
    if damage == "no file":
        file.unlink()
    elif damage == "half a file":
        file.write_text(file.read_text()[:30])
    elif damage == "another run's file":
        file.write_text(json.dumps({**json.loads(file.read_text()), "run": "x"}))
    elif damage == "moved checkpoints":
        folder = folder.rename(tmp_path / "moved")
    else:
        folder = (tmp_path / "run").rename(tmp_path / "moved") / "checkpoints"
        file = tmp_path / "moved/goodput.json"
    monitor, _ = fit(clock, None, max_steps=5, ckpt_path=folder / "step=3.ckpt", default_root_dir=tmp_path)
    found = spent(monitor)
    # the save of 3 seconds, two steps with their batches, 100 seconds of silence
    if damage in FOUND:
        assert len(json.loads(file.read_text())["processes"]) == 2
        assert (found["checkpoint"], found["lost"], found["down"]) == pytest.approx((3, 6, 100))
    else:
        assert found["down"] == pytest.approx(109)
        assert "lost" not in found
        assert "checkpoint" not in found
    assert sum(found.values()) == pytest.approx(clock.now - 1000 + AGE)


def test_a_checkpoint_of_somebody_else_names_no_file_outside_of_the_folder_of_runs(clock, tmp_path):
    folder = tmp_path / "strangers"
    fit(clock, None, save_every(3, folder / "checkpoints"), max_steps=3)
    elsewhere, part = tmp_path / "elsewhere/goodput.json", tmp_path / "elsewhere/.goodput.json.part"
    elsewhere.parent.mkdir()
    (folder / "goodput.json").rename(elsewhere)
    part.write_text("of somebody else")
    before = elsewhere.read_bytes()
    checkpoint = torch.load(folder / "checkpoints/step=3.ckpt", weights_only=True)
    checkpoint["callbacks"]["GoodputMonitor"]["file"] = str(elsewhere)
    torch.save(checkpoint, folder / "checkpoints/step=3.ckpt")
    options = {"max_steps": 5, "ckpt_path": folder / "checkpoints/step=3.ckpt", "default_root_dir": tmp_path / "runs"}
    monitor, _ = fit(clock, None, save_every(1, tmp_path / "runs/checkpoints"), **options)
    assert (elsewhere.read_bytes(), part.read_text()) == (before, "of somebody else")
    assert "lost" not in spent(monitor)  # the file was not read
    assert json.loads((tmp_path / "runs/goodput.json").read_text())["run"] == json.loads(before)["run"]


def test_a_clock_that_was_set_back_takes_no_time_away(clock, tmp_path):
    fit(clock, None, save_every(3, tmp_path), max_steps=3)
    clock.now -= 500.0
    monitor, _ = fit(clock, None, max_steps=5, ckpt_path=tmp_path / "step=3.ckpt")
    assert min(monitor.seconds.values()) >= 0
    assert spent(monitor) == pytest.approx({"setup": 18 + 8, "steps": 2 * 2 + 2, "data": 3})


def test_a_process_older_than_its_checkpoint_counts_no_second_twice(clock, tmp_path, monkeypatch):
    fit(clock, None, save_every(3, tmp_path), max_steps=3)  # from 990 to 1017
    monkeypatch.setattr(goodput_monitor, "_has_fitted", False)
    clock.now += 4.0
    # as a process that started 10 seconds ago, within the first one's time, and waited for the checkpoint
    monitor, _ = fit(clock, None, max_steps=5, ckpt_path=tmp_path / "step=3.ckpt")
    assert sum(monitor.seconds.values()) == pytest.approx(clock.now - 1000 + AGE)


def test_a_checkpoint_without_the_monitor_begins_a_breakdown(clock, tmp_path):
    fit(clock, pl.Callback(), save_every(3, tmp_path), max_steps=3)
    clock.now += 100.0
    monitor, _ = fit(clock, None, max_steps=5, ckpt_path=tmp_path / "step=3.ckpt")
    assert spent(monitor) == pytest.approx({"setup": AGE + 5 + 3, "steps": 2, "data": 1})


def test_a_save_after_the_run_holds_the_run_to_its_end(clock, tmp_path):
    _, trainer = fit(clock, max_steps=3)
    clock.now += 50.0
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    clock.now += 50.0
    monitor, _ = fit(clock, None, max_steps=5, ckpt_path=tmp_path / "late.ckpt")
    assert spent(monitor)["down"] == pytest.approx(103)
    assert not (tmp_path / "goodput.json").exists()  # nothing was saved while the run went on


def test_a_full_disk_stops_nothing_and_is_said_once(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match=r"goodput.json cannot be written: No space") as caught:
        monitor, _ = fit(clock, None, save_every(2, tmp_path))
    assert len([w for w in caught if "goodput.json" in str(w.message)]) == 1
    assert spent(monitor)["checkpoint"] == 9
    assert not list(tmp_path.glob(".goodput*"))


# ------------------------------------------------------------------------------------------------ data, skips, failures


class Event:
    """As a CUDA event on a device that works in its own time: `device.busy_until`."""

    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.now, self.device.busy_until)

    def query(self):
        return self.device.now >= self.at

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_a_wait_counts_as_far_as_the_device_has_nothing_to_do():
    device = SimpleNamespace(now=0.0, busy_until=0.0)
    wait = DeviceWait(lambda: Event(device))

    def step(fetch, work):
        wait.begin()
        device.now += fetch
        wait.end()
        device.busy_until = max(device.now, device.busy_until) + work

    step(fetch=3, work=100)  # the device was idle for 3 seconds
    step(fetch=40, work=100)  # it has work until 103, the host waits until 43
    assert wait.take() == 3
    step(fetch=400, work=100)  # until 203, the host until 443
    device.now = 1000
    assert wait.take() == 240
    assert wait.take() == 0
    assert not wait._pending


class Skips(pl.Callback):
    """Records how many steps were skipped so far, as a guard does."""

    def __init__(self, steps, count=0):
        self.steps, self.count = steps, count

    def on_train_batch_end(self, trainer, *_):
        self.count += trainer.global_step in self.steps
        MetricBuffer.of(trainer).record(SKIPPED, torch.tensor(self.count))


def test_a_step_that_step_guard_skips_is_not_productive(clock):
    class Poisoned(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 3 else 1.0)

    monitor = GoodputMonitor()
    with pytest.warns(UserWarning, match="step 3 is skipped"):
        trainer_with(clock, monitor, StepGuard()).fit(Poisoned(clock), DataLoader(Data(clock), batch_size=None))
    assert spent(monitor) == pytest.approx({"setup": 18, "steps": 8, "skipped": 2, "data": 5})


def test_skips_before_a_restart_are_not_counted_again(clock, tmp_path):
    fit(clock, None, Skips({3}), save_every(3, tmp_path), max_steps=3)
    monitor, _ = fit(clock, None, Skips({5}, count=1), max_steps=6, ckpt_path=tmp_path / "step=3.ckpt")
    assert spent(monitor)["skipped"] == pytest.approx(2 + 2)


def test_a_count_that_begins_anew_begins_at_zero():
    assert newly_skipped([0, 0, 1, 1, 3], 0.0) == (3, 3)
    assert newly_skipped([0, 1], 3.0) == (1, 1)
    assert newly_skipped([], 3.0) == (0, 3.0)


@pytest.mark.parametrize("error", [RuntimeError("power cut"), KeyboardInterrupt()])
def test_the_line_comes_after_an_exception_too(clock, tmp_path, caplog, error):
    trainer = trainer_with(clock, GoodputMonitor(), raises(5, error), save_every(3, tmp_path))
    with caplog.at_level("INFO"), pytest.raises((RuntimeError, SystemExit)):
        trainer.fit(Net(clock), DataLoader(Data(clock), batch_size=None))
    assert "save_checkpoint" not in vars(trainer)  # the Trainer has its own method back
    assert breakdowns(caplog) == [
        "wall 34.0 s = steps 23.5 % + checkpoints 8.8 % + data wait 14.7 % + set-up 53.0 % + other 0.0 %"
    ]
    file = json.loads((tmp_path / "goodput.json").read_text())
    assert file["processes"] == [[990.0, clock.now]]


def test_a_broken_device_hides_neither_the_users_error_nor_the_line(clock, monkeypatch, caplog, recwarn):
    class Breaks:
        """An event of a device that fails at the same time as the step: every later call raises."""

        def record(self):
            pass

        def query(self):
            if broken:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return False

    def stop(trainer, *_):
        if trainer.global_step == 4:
            broken.append(True)
            raise IndexError("the user's own")

    broken, told = [], []
    stops = On(on_train_batch_start=stop, on_exception=lambda *_: told.append(True))
    monkeypatch.setattr(goodput_monitor, "device_wait_on", lambda device: DeviceWait(Breaks))
    with caplog.at_level("INFO"), pytest.raises(IndexError, match="the user's own"):
        fit(clock, None, stops)
    assert told == [True]  # the hooks of later callbacks are called
    assert [line.split(" + ")[0] for line in breakdowns(caplog)] == ["wall 28.0 s = steps 35.7 %"]
    assert any(
        "GoodputMonitor: waits for data since the last logged step count as steps: RuntimeError: CUDA" in str(w.message)
        for w in recwarn
    )


def test_a_fit_that_fails_before_training_has_a_line(clock, caplog):
    def stop(*_):
        raise RuntimeError("no device")

    with caplog.at_level("INFO"), pytest.raises(RuntimeError, match="no device"):
        fit(clock, None, On(on_fit_start=stop))
    assert breakdowns(caplog) == ["wall 15.0 s = steps 0.0 % + set-up 100.0 % + other 0.0 %"]


# ---------------------------------------------------------------------------------------------- several fits, other use


def test_each_fit_without_a_checkpoint_has_a_bill_of_its_own(clock, tmp_path, caplog):
    monitor, net = GoodputMonitor(), Net(clock)
    loader = DataLoader(Data(clock, 3), batch_size=None)
    trainer = trainer_with(clock, monitor, save_every(2, tmp_path), max_steps=-1, max_epochs=1)
    with caplog.at_level("INFO"):
        trainer.fit(net, loader)
        first = spent(monitor)
        clock.now += 1000.0  # a night
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, loader)
    assert first == pytest.approx({"setup": AGE + 5 + 3, "steps": 4, "data": 2, "checkpoint": 3})
    assert spent(monitor) == pytest.approx({"setup": 5 + 3, "steps": 4, "data": 2, "checkpoint": 6})
    assert len(breakdowns(caplog)) == 2
    assert "save_checkpoint" not in vars(trainer)


def test_validating_and_saving_after_the_run_change_no_figure(clock, tmp_path, caplog):
    monitor, trainer = fit(clock)
    before = monitor.seconds
    caplog.clear()
    with caplog.at_level("INFO"):
        trainer.validate(Net(clock), DataLoader(torch.ones(2, 2)), verbose=False)
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert monitor.seconds == before
    assert breakdowns(caplog) == []


def test_a_monitor_that_never_fitted_knows_nothing(clock, tmp_path):
    monitor = GoodputMonitor()
    trainer = trainer_with(clock, monitor, limit_val_batches=1)
    trainer.validate(Net(clock), DataLoader(torch.ones(2, 2)), verbose=False)
    assert monitor.seconds == {}
    assert monitor.state_dict() == {}


def test_without_a_logging_interval_there_is_still_a_bill(clock, caplog):
    with caplog.at_level("INFO"):
        monitor, trainer = fit(clock, log_every_n_steps=0)
    assert spent(monitor) == pytest.approx({"setup": 18, "steps": 10, "data": 5})
    assert len(breakdowns(caplog)) == 1
    assert trainer.logger.last() == {}


def test_no_file_is_written_where_nothing_is_saved(clock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(clock, logger=False)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_written_with_a_save_and_on_log_steps_ten_seconds_apart(clock, tmp_path):
    stamps = []

    def look(*_):
        file = tmp_path / "goodput.json"
        stamps.append(json.loads(file.read_text())["processes"][-1][1] - 990 if file.exists() else None)

    looks = On(on_train_batch_start=look)
    fit(clock, None, looks, ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1), max_steps=15)
    # a step lasts 3 seconds; the first ends at 18, and step 7, which is saved until 39, at 36; log steps are the even
    # ones: 8 ends at 42, 10 at 48, 12 at 54, and step 14, which is saved until 63, at 60
    assert stamps == [None] * 7 + [39, 39, 39, 39, 39, 54, 54, 63]
    assert json.loads((tmp_path / "goodput.json").read_text())["processes"] == [[990.0, clock.now]]


# ---------------------------------------------------------------------------------------------------- the real clock


def test_a_notebook_counts_from_now(monkeypatch):
    monkeypatch.setattr(goodput_monitor, "_has_fitted", False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = time.time()
    assert before <= goodput_monitor.fit_start() <= time.time()


def test_a_real_run_adds_up_to_the_time_outside(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(goodput_monitor, "_has_fitted", True)  # so that it counts from the fit on

    class Inner(pl.Callback):
        """Lies within the time that is counted."""

        def setup(self, *_, **__):
            self.began = time.perf_counter()

        def on_train_end(self, *_):
            self.seconds = time.perf_counter() - self.began

    clock, inner = Clock(), Inner()
    outer = time.perf_counter()
    with caplog.at_level("INFO"):
        monitor, _ = fit(
            clock, None, inner, SafeCheckpoint(tmp_path, every_n_train_steps=4, asynchronous=True), plugins=[],
            max_steps=12, limit_val_batches=1, val_check_interval=5,
        )  # fmt: skip
    outer = time.perf_counter() - outer
    wall = math.fsum(monitor.seconds.values())
    assert inner.seconds <= wall <= outer  # on any machine
    assert all(monitor.seconds[part] > 0 for part in ("setup", "steps", "validation", "checkpoint", "data", "other"))
    assert min(monitor.seconds.values()) >= 0
    (line,) = breakdowns(caplog)
    assert sum(round(10 * float(share)) for share in re.findall(r"([\d.]+) %", line)) == 1000


# ------------------------------------------------------------------------------------------------------ two processes


def train_two(rank, folder):
    clock = Clock().rule()
    if rank:
        clock.now += 1.0
        goodput_monitor.process_age = lambda: 500.0  # another rank's times do not count
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    monitor, trainer = fit(clock, None, save_every(3, folder), **options)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    clock.now += 100.0
    resumed, _ = fit(clock, ckpt_path=f"{folder}/step=6.ckpt", max_steps=8, **options)
    return found, monitor.seconds, resumed.seconds, clock.now


@pytest.mark.long
def test_in_two_processes_the_times_are_those_of_rank_0(tmp_path):
    (found, seconds, resumed, now), _ = processes.run(train_two, str(tmp_path))
    assert seconds["setup"] == pytest.approx(18)
    assert found["goodput/setup"] == pytest.approx(18 / 36)
    assert resumed["down"] == pytest.approx(100)
    assert sum(resumed.values()) == pytest.approx(now - 990)
    assert json.loads((tmp_path / "goodput.json").read_text())["processes"][0][0] == 990.0
    state = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["callbacks"]["GoodputMonitor"]
    assert state["seconds"]["setup"] == pytest.approx(18)
