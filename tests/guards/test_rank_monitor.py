"""RankMonitor: what is a failure and what is none, what is shown of it, and when a process is ended.

How whole runs end is in test_launching.py, who is told what in test_watchdog_channel.py.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness import processes, runs
from harness.models import Small
from harness.preloaded import python
from harness.runs import On
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed.checkpoint import CheckpointException

from lightning_tricks.callbacks import HangWatchdog, RankMonitor
from lightning_tricks.guards.watchdog import rank_monitor
from lightning_tricks.guards.watchdog.rank_monitor import ExceptHook, is_consequence

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:6001"
LONG = 60.0  # seconds, for something that happens at once or never
NCCL = "NCCL communicator was aborted on rank 3."


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(NCCL),
        RuntimeError("Broken pipe"),
        RuntimeError("Timed out waiting 30000ms for recv operation to complete"),
        DistBackendError("ncclRemoteError: A call failed, possibly as a remote process exited"),
        DistNetworkError("Failed to recv, got 0 bytes"),
        DistStoreError("wait timeout after 600000ms"),
        CheckpointException("write", {0: (RuntimeError(GLOO), None)}),
        raised(RuntimeError("could not save"), RuntimeError(GLOO)),
    ],
)
def test_what_a_dead_neighbour_causes_is_a_consequence(error):
    assert is_consequence(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad batch"),
        ValueError(GLOO),  # nothing that torch.distributed raises
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        ConnectionResetError(104, "Connection reset by peer"),  # of a bucket that data come from
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        CheckpointException("write", {0: (OSError("No space left on device"), None)}),
        KeyboardInterrupt(),
    ],
)
def test_what_went_wrong_in_this_process_is_none(error):
    assert not is_consequence(error)


def test_an_error_that_came_while_another_was_handled_is_its_consequence_and_a_ring_of_them_ends():
    first, second = RuntimeError(GLOO), KeyError("x")
    second.__context__, first.__context__ = first, second
    assert is_consequence(second)


class SIGTERMException(SystemExit):
    """Named as Lightning's, which it raises in the fit when the signal comes."""


@pytest.mark.parametrize(
    ("error", "waited"), [(SIGTERMException(), [1.0]), (SystemExit(), []), (KeyboardInterrupt(), [])]
)
def test_a_rank_that_is_told_to_end_leaves_and_waits_a_second_for_the_reason_of_a_launchers_signal(error, waited):
    monitor, seconds, left = RankMonitor(), [], []
    monitor._watch = SimpleNamespace(known=SimpleNamespace(wait=seconds.append), close=lambda: left.append("close"))
    monitor.on_exception(None, None, error)
    assert (seconds, left, monitor._watch) == (waited, ["close"], None)


class Program:
    """A program that a fit has failed in; what is shown of an exception that nobody catches, and what ends then."""

    def __init__(self, monkeypatch) -> None:
        self.shown: list[BaseException] = []
        self.limits: list[float] = []
        monkeypatch.setattr(rank_monitor, "end_within", self.limits.append)
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: self.shown.append(error))

    def fit(self, error: BaseException, hide: bool, children: tuple[subprocess.Popen, ...] = ()) -> BaseException:
        """The exception that comes out of a fit."""
        ExceptHook.mark(raised(error), hide, 2.0, children)
        return error

    def uncaught(self, error: BaseException) -> tuple[list[BaseException], list[float]]:
        """Python's end of a program; what was shown, and the limits that were set."""
        sys.excepthook(type(error), error, error.__traceback__)
        shown, limits = list(self.shown), list(self.limits)
        self.shown.clear(), self.limits.clear()
        return shown, limits


@pytest.mark.long
def test_on_the_way_out_a_consequence_is_hidden_and_children_are_waited_for_and_ended(monkeypatch):
    program = Program(monkeypatch)
    children = tuple(
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({time_})"]) for time_ in (0, 1000)
    )
    error = program.fit(RuntimeError(GLOO), True, children)
    assert program.uncaught(error) == ([], [7.0])  # a little later than what the children are given
    assert [child.wait(10) for child in children] == [0, -signal.SIGKILL]


def test_a_rank_that_failed_by_itself_shows_its_traceback_and_ends_in_time(monkeypatch):
    program = Program(monkeypatch)
    error = program.fit(ValueError("mine"), False)
    assert program.uncaught(error) == ([error], [7.0])


def test_what_the_program_raises_after_a_failed_fit_is_shown_and_ends_in_time(monkeypatch):
    program = Program(monkeypatch)
    first = program.fit(RuntimeError(GLOO), True)
    error = raised(ValueError("the run failed"), first)
    assert program.uncaught(error) == ([error], [7.0])
    second = program.fit(KeyError("second"), False)
    second.__context__ = first  # the second fit is a part of the first one's handling
    assert program.uncaught(second) == ([second], [7.0])


def test_an_exception_of_a_program_that_goes_on_is_as_without(monkeypatch):
    program = Program(monkeypatch)
    program.fit(RuntimeError(GLOO), True)
    hook = sys.excepthook
    program.fit(RuntimeError(GLOO), True)
    assert sys.excepthook is hook  # one for all fits
    own = raised(ValueError("own"))
    assert program.uncaught(own) == ([own], [])


def test_of_a_failed_fit_nothing_is_kept(monkeypatch):
    """A program may go on with a smaller batch: the memory of the first must be free."""

    class LargeError(ValueError):
        pass

    error = Program(monkeypatch).fit(LargeError(), False)
    alive = weakref.ref(error)
    del error
    gc.collect()
    assert alive() is None


@pytest.mark.long
def test_a_process_that_hangs_on_its_way_out_is_ended():
    code = "import time; from lightning_tricks._host.exit import end_within; end_within(0.2); time.sleep(100)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, stderr=subprocess.DEVNULL).returncode == 1


def threads_of_ours() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("rank-monitor", "watchdog-", "hang-watchdog"))]


def test_one_process_has_nothing_to_watch():
    seen: list[list[str]] = []
    runs.fit(Small(), RankMonitor(), On(on_train_start=lambda *_: seen.append(threads_of_ours())))
    assert seen == [[]]


def fit(*callbacks):
    return runs.fit(Small(2, 1), *callbacks, devices=2, strategy="ddp", max_steps=3, logger=False).weights[0]


class Stopped(pl.Callback):
    """Rank 1 stops in mid-run, as under a debugger, and is told to go on by rank 0."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif batch_idx == 1:
            while not Path("pid").exists() or not Path("pid").read_text():
                time.sleep(0.05)
            pid = Path("pid").read_text()
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.05)
            time.sleep(1.0)  # what a false alarm with a grace of 0 would not survive
            os.kill(int(pid), signal.SIGCONT)


def in_two(rank: int, folder: str) -> None:
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.chdir(folder)
    monitor = RankMonitor(grace_seconds=0.0)
    plain = fit()
    assert torch.equal(plain, fit(monitor))
    assert threads_of_ours() == []
    slow_end = On(teardown=lambda trainer, *_, **__: time.sleep(0.5 * trainer.global_rank))  # after rank 0
    both = fit(monitor, HangWatchdog(), Stopped(), slow_end)  # the same monitor, a second fit, over one connection
    assert torch.equal(plain, both)
    assert threads_of_ours() == []

    for go_on in (  # the program has caught it: it is not ended, nor is its next fit, whatever watches that
        lambda monitor, old: old.join(LONG),
        lambda monitor, old: fit(monitor, outlast(old)),
        lambda monitor, old: fit(RankMonitor(grace_seconds=0.0), outlast(old)),
        lambda monitor, old: fit(outlast(old)),
    ):
        monitor = RankMonitor(grace_seconds=1.0)
        with pytest.raises(ValueError, match="everywhere"):
            fit(monitor, On(on_train_batch_start=everywhere))
        go_on(monitor, monitor._watch.timer)
    monitor = RankMonitor(grace_seconds=1.0)
    try:
        fit(monitor, On(on_train_batch_start=everywhere))
    except ValueError:
        assert torch.equal(plain, fit(outlast(monitor._watch.timer)))  # also while the exception is handled
    deadline = time.monotonic() + LONG
    while threads_of_ours():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert torch.equal(plain, fit(monitor))


def everywhere(*_):
    raise ValueError("everywhere")


def outlast(old: threading.Thread) -> On:
    """The fit goes on for longer than the watch of an earlier one, which waits for its grace."""

    def wait(*_):
        old.join(LONG)
        assert not old.is_alive()

    return On(on_train_start=wait)


SCRIPT = """
import os, signal
import pytorch_lightning as pl
import torch
from lightning_tricks.callbacks import RankMonitor

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored

class OneLayer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        {step}
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(100, 2), num_workers={workers})
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=20, callbacks=[RankMonitor(2.0)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(OneLayer(), data)
"""


def script(folder: Path, step: str, workers: int = 0) -> tuple[int, str]:
    """Run a pytorch_lightning program in two processes; its exit code and what it printed."""
    (folder / "train.py").write_text(SCRIPT.format(step=step, workers=workers))
    env = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "MASTER_PORT")}
    done = subprocess.run(
        [python("pytorch_lightning"), "train.py"], cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


KILLED = "batch_idx == 3 and self.global_rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
INTERRUPTED = "batch_idx == 3 and self.global_rank == 0 and os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture(scope="module")
def beside_each_other(tmp_path_factory):
    """A function that waits for `in_two`, or for the program of a step."""
    folders = {name: tmp_path_factory.mktemp("ranks") for name in ("two", KILLED, INTERRUPTED)}
    python("pytorch_lightning")
    programs = {
        "two": (processes.run, in_two, str(folders["two"])),
        KILLED: (script, folders[KILLED], KILLED, 1),
        INTERRUPTED: (script, folders[INTERRUPTED], INTERRUPTED),
    }
    with processes.threads(programs) as wait:
        yield wait


@pytest.mark.long
def test_under_pytorch_lightning_and_with_data_workers_a_killed_rank_is_named(beside_each_other):
    code, out = beside_each_other(KILLED)
    assert code
    assert out.count("rank 1 of 2 on") == 1
    assert "is gone without a word" in out
    assert "Traceback" not in out


@pytest.mark.long
def test_an_interrupt_is_as_without(beside_each_other):
    """Lightning's own words, its exit code, and none of ours."""
    code, out = beside_each_other(INTERRUPTED)
    assert code == 1
    assert "Detected KeyboardInterrupt" in out
    assert "rank 0 of 2" not in out


@pytest.mark.long
def test_what_is_no_failure_ends_nothing_and_changes_nothing(beside_each_other):
    beside_each_other("two")
