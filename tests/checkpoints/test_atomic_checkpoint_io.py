"""Files that survive: written whole or not at all, to the bit, and opened only if nothing in them can do harm."""

import argparse
import collections
import copy
import datetime
import errno
import http.server
import os
import pickle
import resource
import subprocess
import threading
import tracemalloc
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from checkpoints.saved import assert_same, checkpoint, checkpoint_of, in_child, overwrite, trained
from harness.preloaded import python
from harness.runs import On, fit
from torch import nn

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.atomic_checkpoint_io import unsafe_classes
from lightning_tricks.checkpoints.bucket import local_copy
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.checkpoints.write_file import FileForTorch


@pytest.fixture(params=[False, True], ids=["", "asynchronous"])
def writer(request):
    io = AtomicCheckpointIO(asynchronous=request.param)
    yield io
    io.teardown()


def save(io, content, path):
    io.save_checkpoint(content, path)
    io.wait()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_what_is_saved_is_loaded_by_us_torch_and_lightning_and_we_open_theirs(writer, tmp_path):
    expected, plain, ours = checkpoint_of(*trained()), pl.plugins.TorchCheckpointIO(), tmp_path / "a" / "ours.ckpt"
    save(writer, expected, ours)
    for found in (writer.load_checkpoint(ours), torch.load(ours, weights_only=True), plain.load_checkpoint(ours)):
        assert_same(found, expected)
    assert names(tmp_path / "a") == {"ours.ckpt"}
    assert read_record(ours).step == 2
    plain.save_checkpoint(expected, tmp_path / "theirs.ckpt")
    assert_same(writer.load_checkpoint(tmp_path / "theirs.ckpt"), expected)
    assert read_record(tmp_path / "theirs.ckpt") is None


def test_weights_alone_come_back_as_they_were_given_and_those_of_another_program_are_no_checkpoint(writer, tmp_path):
    expected = trained()[0].state_dict()
    save(writer, expected, tmp_path / "ours.ckpt")  # as Lightning's spawn launcher does
    assert_same(writer.load_checkpoint(tmp_path / "ours.ckpt"), expected)
    torch.save(expected, tmp_path / "theirs.ckpt")
    with pytest.raises(UsageError, match="holds no state_dict, so it is no checkpoint of Lightning"):
        writer.load_checkpoint(tmp_path / "theirs.ckpt")


def test_the_file_has_its_name_when_its_owner_is_told(writer, tmp_path):
    told = []
    writer.on_commit = lambda path: told.append((path, verify_checkpoint(path), threading.current_thread()))
    save(writer, checkpoint(), str(tmp_path / "at.ckpt"))
    (path, verified, thread), *others = told
    assert path == verified == tmp_path / "at.ckpt"
    assert not others
    assert (thread is threading.main_thread()) is not writer.asynchronous


def full_disk(monkeypatch, times: int) -> None:
    """Let the first writes of as many files fail in the middle, as a full disk does."""
    left, write = [times], FileForTorch.write

    def failing(self, data):
        if left[0] and self.file.tell() > 200:
            left[0] -= 1
            with open("/dev/full", "wb", buffering=0) as self.file:
                return write(self, data)
        return write(self, data)

    monkeypatch.setattr(FileForTorch, "write", failing)


@pytest.mark.parametrize("answer", ["raise", "skip", "retry", None])
def test_the_owner_says_what_a_full_disk_means(writer, tmp_path, monkeypatch, answer):
    path = tmp_path / "at.ckpt"
    save(writer, checkpoint(step=1), path)
    asked, committed = [], []
    full_disk(monkeypatch, times=2)
    if answer:
        writer.on_error = lambda path, error: asked.append((path, error.errno, names(tmp_path))) or answer
    writer.on_commit = committed.append
    if answer in ("raise", None):
        with pytest.raises(OSError, match="No space left on device") as caught:
            save(writer, checkpoint(step=2), path)
        assert caught.value.errno == errno.ENOSPC
    else:
        save(writer, checkpoint(step=2), path)
    times = {"retry": 2, None: 0}.get(answer, 1)
    assert asked == [(path, errno.ENOSPC, {"at.ckpt"})] * times  # nothing of the new one is left when it is asked
    assert committed == ([path] if answer == "retry" else [])
    assert writer.load_checkpoint(path)["global_step"] == (2 if answer == "retry" else 1)
    assert names(tmp_path) == {"at.ckpt"}


def test_a_file_goes_to_an_address_and_back_and_leaves_nothing_on_the_way_there(writer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for step in (1, 2):
        save(writer, checkpoint(step=step), "memory://folder/at.ckpt")
        assert not any(path.name.endswith("ckpt") for path in tmp_path.rglob("*") if step == 1)
        assert_same(writer.load_checkpoint("memory://folder/at.ckpt"), checkpoint(step=step))
    with pytest.raises(UsageError, match="storage_options=x: AtomicCheckpointIO takes none"):
        writer.save_checkpoint(checkpoint(), "memory://folder/at.ckpt", "x")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_malicious_pickle_is_refused_in_one_line_and_not_run(tmp_path, monkeypatch, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "evil.ckpt" if place == "file" else "memory://evil.ckpt"
    with fsspec.open(path, "wb") as file:
        torch.save({**checkpoint(), "callback": Malicious(tmp_path / "trace")}, file)
    with pytest.raises(UsageError) as caught:
        AtomicCheckpointIO().load_checkpoint(path)
    remedy = "if you trust it, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
    line = f"{local_copy(path)} holds posix.mkdir, which weights_only=True does not allow: {remedy}"
    assert str(caught.value).startswith(line)
    assert not (tmp_path / "trace").exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    (tmp_path / "trace").rmdir()  # it is not harmless
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # Lightning's switch
    AtomicCheckpointIO().load_checkpoint(path)
    assert (tmp_path / "trace").exists()


def test_a_file_of_a_web_server_is_opened_as_safely_as_another(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    torch.save({**checkpoint(), "callback": Malicious(tmp_path / "trace")}, tmp_path / "at.ckpt")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/at.ckpt"
        with pytest.raises(UsageError, match=r"holds posix\.mkdir, which weights_only=True does not allow"):
            AtomicCheckpointIO().load_checkpoint(address)
        loaded = AtomicCheckpointIO().load_checkpoint(address, weights_only=False)
        assert_same(loaded["state_dict"], checkpoint()["state_dict"])
        server.shutdown()
        thread.join()


def test_what_will_not_open_safely_is_said_once_and_saved_all_the_same(writer, tmp_path):
    unsafe = {**checkpoint(), "hyper_parameters": {"data": Path("x")}}
    path = tmp_path / "at.ckpt"
    with pytest.warns(UserWarning, match=r"because it holds pathlib\.PosixPath") as caught:
        save(writer, unsafe, path)
    assert len(caught) == 1
    assert writer.load_checkpoint(path, weights_only=False)["hyper_parameters"] == {"data": Path("x")}
    with pytest.raises(UsageError, match=r"holds pathlib\.\w+, which weights_only=True does not allow"):
        writer.load_checkpoint(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(writer, unsafe, path)
        save(AtomicCheckpointIO(), checkpoint_of(*trained()), path)


@pytest.mark.long
def test_a_save_takes_no_memory_for_the_tensors(tmp_path):
    large = {**checkpoint(), "state_dict": {"weight": torch.ones(2**24)}}  # 64 MiB

    def peak_in_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def measured():
        save(AtomicCheckpointIO(), checkpoint(), tmp_path / "first.ckpt")  # what a first save imports
        before = peak_in_mib()
        tracemalloc.start()
        save(AtomicCheckpointIO(), large, tmp_path / "at.ckpt")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        assert peak_in_mib() - before < 24

    assert in_child(measured) == 0


def test_a_reader_sees_a_valid_checkpoint_at_every_moment(writer, tmp_path):
    path, stop, saves = tmp_path / "last.ckpt", threading.Event(), [0]
    save(writer, checkpoint(step=0), path)

    def save_until_stopped():
        while not stop.is_set():
            saves[0] += 1
            writer.save_checkpoint(checkpoint(step=saves[0], size=20_000), path)
        writer.wait()

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
    assert writer.load_checkpoint(path)["global_step"] == saves[0]


# ---- in the background


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


@pytest.mark.parametrize("full", [False, True], ids=["", "disk full"])
def test_model_checkpoint_deletes_the_older_one_only_when_the_newer_one_is_whole(gate, tmp_path, monkeypatch, full):
    seen = []

    def look(trainer, *_):
        if trainer.global_step == 1:
            gate.set()  # for the first save; the second one waits for it
            trainer.strategy.checkpoint_io._writer._thread.join()
            gate.clear()
        elif trainer.global_step == 2:
            seen.append({path.name for path in tmp_path.glob("*.ckpt")})
            if full:
                full_disk(monkeypatch, times=1)
            gate.set()

    options = {"plugins": [AtomicCheckpointIO(asynchronous=True)], "max_steps": 2, "num_sanity_val_steps": 0}
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    with pytest.raises(OSError, match="No space") if full else nullcontext():
        fit(None, saver, On(on_train_batch_start=look, on_train_end=look), **options)
    assert seen == [{"step=1.ckpt"}]
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"step=1.ckpt" if full else "step=2.ckpt"}


SAVE = """
import sys, torch
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.write_file import FileForTorch

write = FileForTorch.write
def late(self, data):
    if self.file.tell() == 0:
        sys.stdin.readline()
    return write(self, data)
FileForTorch.write = late
AtomicCheckpointIO(asynchronous=True).save_checkpoint({"state_dict": {"w": torch.ones(9)}}, "at.ckpt")
print("the end", flush=True)
sys.exit(3)
"""


@pytest.mark.long
def test_the_end_of_the_program_waits(tmp_path):
    command, pipes = [python(), "-c", SAVE], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout.readline() == "the end\n"
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the writer, which waits for us
            process.wait(timeout=1)
        process.communicate("go on\n")
    assert process.returncode == 3
    assert torch.load(verify_checkpoint(tmp_path / "at.ckpt"))["state_dict"]["w"].sum() == 9


# ---- what weights_only=True would refuse is found at the save


@dataclass
class Settings:
    layers: int = 2


class Kind(Enum):
    A = 1


UNSAFE = {
    "test_atomic_checkpoint_io.Settings": Settings(), "pathlib.PosixPath": Path("x"),
    "datetime.timedelta": datetime.timedelta(1), "argparse.Namespace": argparse.Namespace(a=1),
    "decimal.Decimal": Decimal(1), "test_atomic_checkpoint_io.Kind": Kind.A, "functools.partial": partial(int),
    "torch.nn.modules.linear.Linear": nn.Linear(1, 1),
}  # fmt: skip
SAFE = [
    None, 10**40, "text", bytearray(b"x"), {1}, (1, 2), {"a": {1: 2}}, torch.Size([1]), collections.OrderedDict(a=1),
    torch.float32, torch.device("cpu"), nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(),
]  # fmt: skip


def found_in(value, path: Path) -> list[str]:
    torch.save({"state_dict": {"weight": torch.ones(1)}, "a": {"b": [0, value]}}, path)
    return unsafe_classes(path)


def test_the_classes_of_what_does_not_open_are_named_and_nothing_else(tmp_path):
    path = tmp_path / "at.ckpt"
    for name, value in UNSAFE.items():
        assert name in found_in(value, path)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    with torch.serialization.safe_globals([Settings]):  # what the program allows
        assert found_in(Settings(), path) == []
    for value in SAFE:
        assert found_in(value, path) == [], value
        torch.load(path, weights_only=True)
    assert len(found_in(2**3000, path)) == 1  # a number that torch cannot read
