"""Files that survive: written whole or not at all, to the bit, and opened only if nothing in them can do harm."""

import errno
import os
import pickle
import resource
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

sys.path.insert(0, str(Path(__file__).parent))
from saved import assert_same, checkpoint, checkpoint_of, in_child, trained

from lightning_tricks._errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.checksummed_file import FileForTorch
from lightning_tricks.checkpoints.record import read_record


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


def test_what_is_loaded_is_what_was_saved(writer, tmp_path):
    expected = checkpoint_of(*trained())
    save(writer, expected, tmp_path / "a" / "at.ckpt")
    assert_same(writer.load_checkpoint(tmp_path / "a" / "at.ckpt"), expected)
    assert names(tmp_path / "a") == {"at.ckpt"}
    assert read_record(tmp_path / "a" / "at.ckpt").step == 2


def test_torch_and_lightning_open_our_file_and_we_theirs(writer, tmp_path):
    expected, plain = checkpoint_of(*trained()), pl.plugins.TorchCheckpointIO()
    save(writer, expected, tmp_path / "ours.ckpt")
    plain.save_checkpoint(expected, tmp_path / "theirs.ckpt")
    assert_same(torch.load(tmp_path / "ours.ckpt", weights_only=True), expected)
    assert_same(plain.load_checkpoint(tmp_path / "ours.ckpt"), expected)
    assert_same(writer.load_checkpoint(tmp_path / "theirs.ckpt"), expected)
    assert read_record(tmp_path / "theirs.ckpt") is None


def test_weights_alone_come_back_as_they_were_given_and_those_of_another_program_are_no_checkpoint(writer, tmp_path):
    expected = trained()[0].state_dict()
    save(writer, expected, tmp_path / "ours.ckpt")  # as Lightning's spawn launcher does
    assert_same(writer.load_checkpoint(tmp_path / "ours.ckpt"), expected)
    torch.save(expected, tmp_path / "theirs.ckpt")
    with pytest.raises(UsageError, match="holds no state_dict, so it is no checkpoint of Lightning"):
        writer.load_checkpoint(tmp_path / "theirs.ckpt")


def test_a_trainer_saves_and_resumes_through_it(writer, tmp_path):
    def trainer(steps):
        kwargs = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        return pl.Trainer(max_steps=steps, plugins=[writer], enable_model_summary=False, **kwargs)

    first = trainer(2)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "at.ckpt")
    first.strategy.teardown()  # which waits
    second = trainer(3)
    second.fit(BoringModel(), ckpt_path=tmp_path / "at.ckpt")
    assert second.global_step == 3


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


def test_a_disk_that_is_really_full_leaves_the_older_checkpoint(writer, tmp_path):
    path = tmp_path / "at.ckpt"
    save(writer, checkpoint(step=1), path)

    def in_a_small_space():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError, match="File too large") as caught:
            save(writer, checkpoint(step=2, size=100_000), path)
        assert caught.value.errno == errno.EFBIG
        save(writer, checkpoint(step=3), path)  # and it goes on

    assert in_child(in_a_small_space) == 0
    assert writer.load_checkpoint(path)["global_step"] == 3
    assert names(tmp_path) == {"at.ckpt"}


def test_what_cannot_be_pickled_leaves_the_older_checkpoint(writer, tmp_path):
    path = tmp_path / "at.ckpt"
    save(writer, checkpoint(step=1), path)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save(writer, {**checkpoint(step=2), "callbacks": lambda: None}, path)
    assert writer.load_checkpoint(path)["global_step"] == 1
    assert names(tmp_path) == {"at.ckpt"}


def test_the_temporary_folder_is_not_used(writer, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    save(writer, checkpoint(), tmp_path / "at.ckpt")
    assert names(tmp_path) == {"at.ckpt"}


def test_an_address_goes_lightnings_way(writer):
    save(writer, checkpoint(), "memory://folder/at.ckpt")
    assert fsspec.filesystem("memory").exists("folder/at.ckpt")
    assert_same(writer.load_checkpoint("memory://folder/at.ckpt"), checkpoint())
    with pytest.raises(UsageError, match="storage_options=x: AtomicCheckpointIO takes none"):
        writer.save_checkpoint(checkpoint(), "memory://folder/at.ckpt", "x")


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("place", ["file", "memory"])
def test_a_malicious_pickle_is_refused_in_one_line_and_not_run(tmp_path, place):
    path = tmp_path / "evil.ckpt" if place == "file" else "memory://evil.ckpt"
    with fsspec.open(path, "wb") as file:
        torch.save({**checkpoint(), "callbacks": Malicious(tmp_path / "trace")}, file)
    with pytest.raises(UsageError) as caught:
        AtomicCheckpointIO().load_checkpoint(path)
    remedy = "if you trust it, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
    assert str(caught.value).startswith(f"{path} holds posix.mkdir, which weights_only=True does not let in: {remedy}")
    assert not (tmp_path / "trace").exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    assert (tmp_path / "trace").exists()  # it is not harmless


def test_an_address_is_opened_as_safely_as_a_file(monkeypatch):
    def load(self, path, map_location=None, weights_only=None):
        asked.append(weights_only)
        return checkpoint()

    asked = []
    monkeypatch.setattr(pl.plugins.TorchCheckpointIO, "load_checkpoint", load)  # for http, None would let in everything
    for weights_only in (None, True, False):
        AtomicCheckpointIO().load_checkpoint("http://host/at.ckpt", weights_only=weights_only)
    assert asked == [True, True, False]


def test_lightnings_switch_for_trusted_checkpoints_works_for_files_and_addresses(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for number, path in enumerate((tmp_path / "at.ckpt", "memory://at.ckpt")):
        with fsspec.open(path, "wb") as file:
            torch.save({**checkpoint(), "callbacks": Malicious(tmp_path / str(number))}, file)
        AtomicCheckpointIO().load_checkpoint(path)
        assert (tmp_path / str(number)).exists()


def test_a_damaged_pickle_of_torchs_old_format_is_one_line(tmp_path):
    path = tmp_path / "old.ckpt"
    torch.save(checkpoint(), path, _use_new_zipfile_serialization=False)
    assert_same(AtomicCheckpointIO().load_checkpoint(path), checkpoint())
    content = path.read_bytes()
    for size in (2, 3, 20, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UsageError, match=r"old\.ckpt ") as caught:
            AtomicCheckpointIO().load_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_what_will_not_open_safely_is_said_once_and_saved_all_the_same(writer, tmp_path):
    unsafe = {**checkpoint(), "hyper_parameters": {"data": Path("x")}}
    with pytest.warns(UserWarning, match=r"because of hyper_parameters\.data \(pathlib\.PosixPath\)") as caught:
        save(writer, unsafe, tmp_path / "first.ckpt")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(writer, unsafe, tmp_path / "second.ckpt")
    for name in ("first.ckpt", "second.ckpt"):
        assert writer.load_checkpoint(tmp_path / name, weights_only=False)["hyper_parameters"] == {"data": Path("x")}
        with pytest.raises(UsageError, match=r"holds pathlib\.\w+, which weights_only=True does not let in"):
            writer.load_checkpoint(tmp_path / name)


def test_a_safe_checkpoint_gives_no_warning(writer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(writer, checkpoint_of(*trained()), tmp_path / "at.ckpt")


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
