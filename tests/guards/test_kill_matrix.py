"""A kill or a full disk at any moment of a save: what is there is whole, and the next run goes on."""

import contextlib
import errno
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import processes
from harness.models import Small, adamw
from harness.runs import trainer_with

from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.record import damage, read_record
from lightning_tricks.checkpoints.write_file import FileForTorch

pytestmark = pytest.mark.long

FORK = multiprocessing.get_context("fork")

SAVES = [(how, asynchronous) for how in ("file", "link") for asynchronous in (False, True)]
KINDS = ("SIGKILL", "ENOSPC")


class Moments:
    """Counts the moments at which this process changes a file, and ends it, or lets its disk be full, at one of them.

    Args:
        number: of that moment, from 1.
        kind: SIGKILL, as a scheduler sends that waits no longer, or ENOSPC.
    """

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind, self.seen = number, kind, 0

    def here(self) -> None:
        self.seen += 1
        if self.seen == self.number:
            if self.kind == "ENOSPC":
                raise OSError(errno.ENOSPC, "No space left on device")
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Be there at each write into a checkpoint, before each `fsync`, and around each change of a name."""

        def streamed(write: Any) -> Any:
            def written(file: Any, data: Any) -> Any:
                if file.file.tell() % 3:
                    file.file.flush()  # so that a part of what was written is in the file
                try:
                    self.here()
                except OSError as error:
                    file.error = error  # as the real write does, for torch raises another one
                    raise
                return write(file, data)

            return written

        def around(call: Any, after: bool = True) -> Any:
            def called(*args: Any, **options: Any) -> Any:
                self.here()
                result = call(*args, **options)
                if after:
                    self.here()
                return result

            return called

        FileForTorch.write = streamed(FileForTorch.write)
        os.fsync = around(os.fsync, after=False)
        for owner, names in CHANGES.items():
            for name in names:
                setattr(owner, name, around(getattr(owner, name)))


CHANGES: dict[Any, tuple[str, ...]] = {Path: ("replace", "rename", "unlink", "symlink_to"), shutil: ("rmtree",)}


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def save_once_more(folder: Path, how: str, asynchronous: bool) -> None:
    """Write a checkpoint one step newer than the newest of the folder."""
    if how == "file":
        path, io = folder / "last.ckpt", AtomicCheckpointIO(asynchronous)
        step = read_record(path).step + 1 if path.exists() else 0
        io.save_checkpoint({"global_step": step, "state_dict": {"weight": torch.full((100,), float(step))}}, path)
        io.wait()
        return
    last = folder / "last.ckpt"
    done = read_record(last).step if last.exists() else 0
    saver = SafeCheckpoint(folder, every_n_train_steps=1, keep_last=1, asynchronous=asynchronous)
    trainer_with(saver, max_steps=done + 2).fit(Small(optimizer=adamw), ckpt_path=last if done else None)


def attempt(folder: Path, save: tuple[str, bool], number: int, kind: str, temporary: Path) -> tuple[int, int]:
    """Save in a process to which something happens at one moment; its exit code, and the moments that it came to."""
    listen, say = FORK.Pipe(duplex=False)

    def child() -> None:
        be_quiet()
        tempfile.tempdir = str(temporary)
        moments = Moments(number, kind)
        moments.watch()
        with contextlib.suppress(OSError):
            save_once_more(folder, *save)
        say.send(moments.seen)

    process = FORK.Process(target=child)
    process.start()
    say.close()
    process.join()
    with contextlib.suppress(EOFError):
        return process.exitcode, listen.recv()
    return process.exitcode, 0


def check_whole(folder: Path) -> int:
    """Every checkpoint is whole to the byte, and opens; the step to which `last.ckpt` leads."""
    paths = list(folder.glob("*.ckpt"))
    for path in paths:
        assert damage(path, read_record(path)) is None
    content = torch.load(folder / "last.ckpt", weights_only=True)
    assert content["global_step"] == read_record(folder / "last.ckpt").step
    hidden = [path.name for path in folder.iterdir() if path not in paths]
    assert all(name.endswith((".saving", ".replaced")) for name in hidden)
    assert len(hidden) <= 2, "the next save removes what a killed one left"
    return int(content["global_step"])


def save_at_all_moments(tmp_path: Path, how: str, asynchronous: bool) -> None:
    """Ten moments from a first change of a file on, and three around the end, with the kinds in turns."""
    folder, temporary, save = tmp_path / "saved", tmp_path / "temporary", (how, asynchronous)
    folder.mkdir()
    temporary.mkdir()
    for _ in range(2):
        assert attempt(folder, save, 0, "", temporary)[0] == 0
    _, count = attempt(folder, save, 0, "", temporary)
    assert count > 20
    draw = random.Random(f"{how} {asynchronous}")
    numbers = [*sorted(draw.sample(range(1, count - 5), 10)), *range(count - 5, count + 1, 2)]
    for number, kind in zip(numbers, cycle(KINDS), strict=False):
        before = check_whole(folder)
        code, _ = attempt(folder, save, number, kind, temporary)
        assert code == (-signal.SIGKILL if kind == "SIGKILL" else 0)
        assert before <= check_whole(folder) <= before + 2
    before = check_whole(folder)
    assert attempt(folder, save, 0, "", temporary)[0] == 0
    assert check_whole(folder) > before
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert (folder / "last.ckpt").is_symlink() == (how == "link")
    assert not list(temporary.iterdir()), "nothing is staged on another file system"


@pytest.fixture(scope="module")
def wait_for(tmp_path_factory):
    runs = {str(save): (save_at_all_moments, tmp_path_factory.mktemp("saves"), *save) for save in SAVES}
    with processes.processes(runs) as wait:
        yield wait


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_whatever_happens_in_a_save_every_checkpoint_is_whole_and_the_next_run_goes_on(wait_for, save):
    wait_for(str(save))
