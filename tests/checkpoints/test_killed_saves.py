"""kill -9 at any moment of a save, and a reader that never stops: there is a valid checkpoint at every moment."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from saved import checkpoint, in_child

from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.checksummed_file import FileForTorch


def step_of(path: Path) -> int:
    """The step of a checkpoint, every byte of which is checked."""
    content = AtomicCheckpointIO().load_checkpoint(path)
    assert (content["state_dict"]["weight"] == content["global_step"]).all()
    return content["global_step"]


def at_each_moment(moment: Callable[[], None]) -> None:
    """Have `moment` called before each piece of a file is written, and around each call to the file system."""
    write = FileForTorch.write

    def streamed(self, data):
        if self.file.tell() % 3:
            self.file.flush()  # so that a part of what was written is in the file
        moment()
        return write(self, data)

    def around(function):
        def called(*args, **kwargs):
            moment()
            result = function(*args, **kwargs)
            moment()
            return result

        return called

    FileForTorch.write = streamed
    os.fsync, Path.replace, Path.rename = around(os.fsync), around(Path.replace), around(Path.rename)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, asynchronous):
    path, count = tmp_path / "last.ckpt", tmp_path / "count"

    def killed_at(number: int) -> Callable[[], None]:
        def save():
            seen = [0]

            def moment():
                seen[0] += 1
                if seen[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            at_each_moment(moment)
            io = AtomicCheckpointIO(asynchronous)
            io.save_checkpoint(checkpoint(step=step_of(path) + 1), path)
            io.wait()
            count.write_text(str(seen[0]))

        return save

    AtomicCheckpointIO().save_checkpoint(checkpoint(step=0), path)
    assert in_child(killed_at(0)) == 0
    moments = int(count.read_text())
    assert moments > 20
    last_ones = range(moments - 5, moments + 1)  # around fsync, rename and fsync of the folder
    newer = 0
    for number in [*random.Random(0).sample(range(1, moments - 5), 14), *last_ones]:
        before = step_of(path)
        assert in_child(killed_at(number)) == -signal.SIGKILL
        assert step_of(path) in (before, before + 1)
        newer += step_of(path) - before
        assert {entry.name for entry in tmp_path.iterdir()} <= {"last.ckpt", ".last.ckpt.saving", "count"}
    assert newer == 3  # the rename was done: after it, before and after the fsync of the folder
    before = step_of(path)
    assert in_child(killed_at(0)) == 0  # what the killed ones left is in nobody's way
    assert step_of(path) == before + 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"last.ckpt", "count"}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_a_reader_sees_a_valid_checkpoint_at_every_moment(tmp_path, asynchronous):
    path, stop, saves = tmp_path / "last.ckpt", threading.Event(), [0]
    AtomicCheckpointIO().save_checkpoint(checkpoint(step=0), path)

    def save_until_stopped():
        io = AtomicCheckpointIO(asynchronous)
        while not stop.is_set():
            saves[0] += 1
            io.save_checkpoint(checkpoint(step=saves[0], size=20_000), path)
        io.wait()

    saver = threading.Thread(target=save_until_stopped)
    saver.start()
    try:
        seen = []
        while len(set(seen)) < 20:
            verify_checkpoint(path)
            seen.append(torch.load(path)["global_step"])
    finally:
        stop.set()
        saver.join()
    assert seen == sorted(seen)
    assert step_of(path) == saves[0]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_a_temporary_folder_on_another_file_system_is_left_empty_by_a_kill(tmp_path, monkeypatch):
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system")
    path = tmp_path / "last.ckpt"
    before = set(os.listdir("/dev/shm"))
    AtomicCheckpointIO().save_checkpoint(checkpoint(step=0), path)

    def killed():
        import tempfile

        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
        written = [0]

        def moment():
            written[0] += 1
            if written[0] == 20:
                os.kill(os.getpid(), signal.SIGKILL)

        at_each_moment(moment)
        AtomicCheckpointIO().save_checkpoint(checkpoint(step=1), path)

    assert in_child(killed) == -signal.SIGKILL
    assert step_of(path) == 0
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ckpt" in name or name.startswith("tmp")]
