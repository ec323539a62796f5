"""kill -9 in a save: a reader who looks every 10 ms finds `last.ckpt` whole, and at least one whole checkpoint."""

import multiprocessing
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside
import pytest
import torch
from beside import Beside
from killed_saves import run

from lightning_tricks.checkpoints.record import damage, read_record

FORK = multiprocessing.get_context("fork")
KILLS = 13  # in each of four variants: 52


def step_of(content: bytes, scratch: Path) -> int | None:
    """The step in the record of a checkpoint file, None where a byte of the file is not as it was written."""
    scratch.write_bytes(content)  # read once, so that no other file can take its place between two looks
    record = read_record(scratch)
    return None if record is None or damage(scratch, record) else record.step


class Reader:
    """Looks into a folder every 10 ms; `wrong` lists what it should not have seen."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.looks, self.wrong, self.newest = 0, [], 0

    def run(self, stop: Any, say: Any) -> None:
        """Look until it is told to stop, and say what was seen."""
        while not stop.wait(0.01):
            if not self.newest and not os.path.lexists(self.folder / "last.ckpt"):
                continue  # the first save has not come to its end
            self.looks += 1
            self.look_at_last()
            self.look_at_all()
        say.send(self)

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


def kill_in_a_save(dice, *args) -> int:
    """Start a run, and kill it at a random moment of one of its next saves, whose number is returned."""
    listen, say = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(*args[:2], say, *args[2:]), daemon=True)
    process.start()
    say.close()
    number = dice.randint(1, 4)
    for _ in range(number):
        listen.recv()
    listen.close()
    threading.Event().wait(dice.random() * 0.05)  # somewhere in this save, or between it and the next
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return number


def kill_in_saves(tmp_path: Path, last: str, asynchronous: bool) -> None:
    """One variant, in a process that starts the runs as its own children."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as temporary:
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        dice, stop = random.Random(f"{last} {asynchronous}"), FORK.Event()
        listen, say = FORK.Pipe(duplex=False)
        FORK.Process(target=Reader(folder, tmp_path / "read").run, args=(stop, say), daemon=True).start()
        kills = [kill_in_a_save(dice, folder, Path(temporary), last, asynchronous) for _ in range(KILLS)]
        stop.set()
        reader = listen.recv()
        assert not list(Path(temporary).iterdir())  # nothing is staged on another file system
    assert not reader.wrong
    assert reader.looks > KILLS
    # each run went on from the one before: a save waits for an earlier one in the background, and none is lost
    done = sum(max(number - (2 if asynchronous else 1), 0) for number in kills)
    assert read_record(folder / "last.ckpt").step >= done > max(kills) + 2
    assert (folder / "last.ckpt").is_symlink() == (last == "link")
    # what a kill left is swept by the next run: at most that of the last kill is here
    assert len([path for path in folder.iterdir() if path.name.startswith(".")]) <= 2
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == read_record(folder / "last.ckpt").step


VARIANTS = [(last, asynchronous) for last in ("link", "copy") for asynchronous in (False, True)]


@pytest.fixture(scope="module")
def wait_for(tmp_path_factory) -> Iterator[Beside]:
    runs = {str(variant): (kill_in_saves, tmp_path_factory.mktemp("killed"), *variant) for variant in VARIANTS}
    with beside.processes(runs) as wait:
        yield wait


@pytest.mark.parametrize(("last", "asynchronous"), VARIANTS)
def test_a_kill_in_a_save_leaves_whole_checkpoints_at_every_moment(wait_for, last, asynchronous):
    wait_for(str((last, asynchronous)))
