"""kill -9 in a save: a reader who looks every 10 ms finds `last.ckpt` whole, and at least one whole checkpoint."""

import multiprocessing
import os
import random
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from killed_saves import run
from two_processes import PRELOADED

from lightning_tricks.checkpoints.record import damage, read_record

KILLS = 13  # in each of four variants: 52


def step_of(content: bytes, scratch: Path) -> int | None:
    """The step in the record of a checkpoint file, None where a byte of the file is not as it was written."""
    scratch.write_bytes(content)  # read once, so that no other file can take its place between two looks
    record = read_record(scratch)
    return None if record is None or damage(scratch, record) else record.step


class Reader(threading.Thread):
    """Looks into a folder every 10 ms; `wrong` lists what it should not have seen."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.scratch, self.stop = folder, scratch, threading.Event()
        self.looks, self.wrong, self.newest = 0, [], 0

    def run(self) -> None:
        while not self.stop.wait(0.01):
            if not self.newest and not os.path.lexists(self.folder / "last.ckpt"):
                continue  # the first save has not come to its end
            self.looks += 1
            self.look_at_last()
            self.look_at_all()

    def look_at_last(self) -> None:
        try:
            step = step_of((self.folder / "last.ckpt").read_bytes(), self.scratch)
        except OSError as error:
            self.wrong.append(f"last.ckpt: {error}")
            return
        if step is None:
            self.wrong.append("last.ckpt is not whole")
        elif step < self.newest:
            self.wrong.append(f"last.ckpt went back from step {self.newest} to {step}")
        else:
            self.newest = step

    def look_at_all(self) -> None:
        for _ in range(50):  # one may be deleted between listing and reading, when a newer one is there
            for path in self.folder.glob("step=*.ckpt"):
                try:
                    if step_of(path.read_bytes(), self.scratch) is not None:
                        return
                    self.wrong.append(f"{path.name} is not whole")
                except FileNotFoundError:
                    pass
        self.wrong.append("no whole checkpoint")


@pytest.fixture(scope="module")
def forked():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def kill_in_a_save(forked, dice, *args) -> None:
    """Start a run, and kill it at a random moment of one of its next saves."""
    listen, say = forked.Pipe(duplex=False)
    process = forked.Process(target=run, args=(*args[:2], say, *args[2:]), daemon=True)
    process.start()
    say.close()
    for _ in range(dice.randint(1, 4)):
        listen.recv()
    threading.Event().wait(dice.random() * 0.05)  # somewhere in this save, or between it and the next
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("last", ["link", "copy"])
def test_a_kill_in_a_save_leaves_whole_checkpoints_at_every_moment(forked, tmp_path, last, asynchronous):
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as temporary:
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        dice, reader = random.Random(f"{last} {asynchronous}"), Reader(folder, tmp_path / "read")
        reader.start()
        for _ in range(KILLS):
            kill_in_a_save(forked, dice, folder, Path(temporary), last, asynchronous)
        reader.stop.set()
        reader.join()
        assert not list(Path(temporary).iterdir())  # nothing is staged on another file system
    assert not reader.wrong
    assert reader.looks > KILLS
    assert reader.newest >= KILLS  # each run went on from the one before
    assert (folder / "last.ckpt").is_symlink() == (last == "link")
    # what a kill left is swept by the next run: at most that of the last kill is here
    assert len([path for path in folder.iterdir() if path.name.startswith(".")]) <= 2
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == read_record(folder / "last.ckpt").step
