"""Saves in the background: one at a time, none lost, no error unsaid, and never a moment without a valid checkpoint."""

import copy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from preloaded import python
from saved import assert_same, checkpoint, checkpoint_of, trained
from test_snapshot import overwrite

from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.background_writer import BackgroundWriter
from lightning_tricks.checkpoints.checksummed_file import FileForTorch


@pytest.fixture
def gate(monkeypatch):
    """Keeps each write waiting at its first byte until the event is set."""
    opened, write = threading.Event(), FileForTorch.write

    def waiting(self, data):
        assert opened.wait(60)
        return write(self, data)

    monkeypatch.setattr(FileForTorch, "write", waiting)
    yield opened
    opened.set()


def test_what_is_written_is_the_state_at_the_save_though_all_of_it_is_overwritten_at_once(gate, tmp_path):
    module, optimizer, scaler = trained()
    io, tree = AtomicCheckpointIO(asynchronous=True), checkpoint_of(module, optimizer, scaler)
    expected = copy.deepcopy(tree)
    io.save_checkpoint(tree, tmp_path / "at.ckpt")
    overwrite(module, optimizer)
    optimizer.state.clear()
    tree["random"]["torch"].zero_()
    scaler.update(3.0)
    gate.set()
    io.wait()
    assert_same(io.load_checkpoint(tmp_path / "at.ckpt"), expected)
    tree = checkpoint_of(module, optimizer, scaler)
    expected = copy.deepcopy(tree)
    io.save_checkpoint(tree, tmp_path / "at.ckpt")  # and again, over it
    overwrite(module, optimizer)
    io.wait()
    assert_same(io.load_checkpoint(tmp_path / "at.ckpt"), expected)


def test_a_save_returns_before_the_file_is_there_and_the_next_one_waits(gate, tmp_path):
    io, done = AtomicCheckpointIO(asynchronous=True), []
    io.on_commit = lambda path: done.append(path.name)
    io.save_checkpoint(checkpoint(), tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
    second = threading.Thread(target=io.save_checkpoint, args=(checkpoint(), tmp_path / "two.ckpt"))
    second.start()
    assert not (tmp_path / ".two.ckpt.saving").exists()
    assert second.is_alive()
    gate.set()
    second.join()
    assert done[:1] == ["one.ckpt"]  # before the second save has returned
    io.wait()
    assert done == ["one.ckpt", "two.ckpt"]


def test_an_error_is_raised_once_by_whatever_comes_next(tmp_path):
    (tmp_path / "file").write_text("no folder")
    io = AtomicCheckpointIO(asynchronous=True)

    def failed_write():
        io.save_checkpoint(checkpoint(), tmp_path / "file" / "at.ckpt")
        io._writer._thread.join()

    io.raise_if_failed()
    for comes_next in (
        io.raise_if_failed,
        io.wait,
        io.teardown,
        lambda: io.save_checkpoint(checkpoint(), tmp_path / "at.ckpt"),
    ):
        failed_write()
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            comes_next()
        io.raise_if_failed()
        io.wait()
    assert not (tmp_path / "at.ckpt").exists()


def test_asking_for_errors_does_not_wait():
    writer, go_on = BackgroundWriter(), threading.Event()
    writer.start(lambda: go_on.wait(60))
    writer.raise_if_failed()
    assert writer._thread.is_alive()
    go_on.set()
    writer.wait()


SAVE = """
import sys, torch
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.checksummed_file import FileForTorch
import os, signal

io, write = AtomicCheckpointIO(asynchronous=True), FileForTorch.write
io.save_checkpoint({"state_dict": {"w": torch.zeros(1000)}, "lr_schedulers": []}, "at.ckpt")
io.wait()
def late(self, data):
    if self.file.tell() == 0:
        sys.stdin.readline()
    return write(self, data)
def killed(self, data):
    if self.file.tell() > 1000:
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)
FileForTorch.write = {"late": late, "killed": killed}[sys.argv[1]]
io.save_checkpoint({"state_dict": {"w": torch.ones(1000)}, "lr_schedulers": []}, "at.ckpt")
if sys.argv[1] == "killed":
    io.wait()
print("the end", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["late", "killed"])
def test_the_end_of_the_program_waits_and_a_kill_leaves_the_older_file(tmp_path, how):
    command, pipes = [python(), "-c", SAVE, how], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        if how == "late":
            assert process.stdout.readline() == "the end\n"
            with pytest.raises(subprocess.TimeoutExpired):  # it waits for the writer, which waits for us
                process.wait(timeout=1)
        process.communicate("go on\n")
    assert process.returncode == (3 if how == "late" else -signal.SIGKILL)
    weights = torch.load(verify_checkpoint(tmp_path / "at.ckpt"))["state_dict"]["w"]
    assert weights.sum() == (1000 if how == "late" else 0)
    assert (tmp_path / ".at.ckpt.saving").exists() == (how == "killed")
