"""A folder of shards is whole or is not there: full disks, kills and damage on one rank only, with real processes."""

import errno
import os
import resource
import shutil
import signal
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import lightning_tricks.strategies.checkpoint_folder as checkpoint_folder
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO, check_checkpoint, open_checkpoint
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.record import KEY, read_record, record_of
from lightning_tricks.checkpoints.write_file import ChecksummedFile
from lightning_tricks.parallel.agreement import broadcast, on_all_ranks, on_rank_0
from lightning_tricks.strategies import DeepSpeedZeROStrategy
from lightning_tricks.strategies.checkpoint_folder import FolderWriter, check_together, verify_together
from lightning_tricks.strategies.fsdp2.sharded_checkpoint import shards_to_save, state_by_name, write_shards

pytestmark = pytest.mark.long
FLIPS = 20
WIDTH = 32


def sharded(rank: int, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers on two ranks, after a step of AdamW."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(steps):
        module(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
    return module, optimizer


def checkpoint_of(module: nn.Module, optimizer: torch.optim.Optimizer, step: int = 3) -> dict[str, Any]:
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [state_by_name(module, optimizer)],
        "lr_schedulers": [],
        "global_step": step,
        "loops": {"seen": [torch.arange(3)]},
        "pytorch-lightning_version": "2.6.0",
        KEY: {"record": {"step": step, "number": 7}},
    }


def whole(tree: Any) -> Any:
    """Copies of all tensors of nested dicts, gathered; every rank must call."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        return tree.full_tensor().clone()
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def checkpoint_io(**callbacks: Any) -> Any:
    """The attributes of an AtomicCheckpointIO that a FolderWriter asks, and which answers it was given."""
    return SimpleNamespace(asynchronous=False, **{"on_commit": None, "on_error": None, **callbacks})


def save(checkpoint: dict[str, Any], path: Path, io: Any, write: Any = write_shards) -> None:
    writer = FolderWriter(timedelta(seconds=300))
    writer.save(path, shards_to_save(checkpoint), write, record_of(checkpoint), io)
    io.wait() if io.asynchronous else None


def limit_file_size(size: int) -> None:
    """From now on this process has a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def unlimited() -> None:
    limit_file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def full_disks(rank: int, folder: Path) -> None:
    """One rank's disk is full; what all ranks do then is what rank 0's `on_error` says."""
    module, optimizer = sharded(rank)
    path = folder / "at.ckpt"
    committed: list[Path] = []
    save(checkpoint_of(module, optimizer, 1), path, checkpoint_io(on_commit=committed.append))
    assert committed == ([path] if rank == 0 else [])
    for full in (0, 1):
        for answer in ("raise", "skip", "retry"):
            asked: list[Any] = []

            def on_error(path: Path, error: OSError, asked: Any = asked, answer: str = answer) -> str:
                assert not (folder / ".at.ckpt.saving").exists(), "nothing is left of the new one"
                asked.append((path, error.errno))
                return answer

            attempts: list[int] = []

            def write(*args: Any, full: int = full, attempts: list[int] = attempts) -> Any:
                attempts.append(1)
                if rank == full and len(attempts) == 1:
                    limit_file_size(6000)
                try:
                    return write_shards(*args)
                finally:
                    unlimited()

            io = checkpoint_io(on_error=on_error, on_commit=committed.append)
            step = 10 * full + len(answer)
            committed.clear()
            if answer == "raise":
                with pytest.raises(OSError, match="too large") as caught:
                    save(checkpoint_of(module, optimizer, step), path, io, write)
                assert caught.value.errno == errno.EFBIG
                assert rank == full or f"on rank {full}" in str(caught.value)
            else:
                save(checkpoint_of(module, optimizer, step), path, io, write)
            assert asked == ([(path, errno.EFBIG)] if rank == 0 else [])
            assert len(attempts) == (2 if answer == "retry" else 1)
            assert committed == ([path] if rank == 0 and answer == "retry" else [])
            assert {entry.name for entry in folder.iterdir()} == {"at.ckpt"}
            on_rank_0(lambda: None)  # nobody goes on while another one looks
            verify_together(path)
            assert read_record(path).step == (step if answer == "retry" else 1 if full == 0 else 5)


def other_errors(rank: int, folder: Path) -> None:
    module, optimizer = sharded(rank)
    checkpoint = checkpoint_of(module, optimizer)
    with pytest.raises((AttributeError, RuntimeError), match=r"local object|Can't pickle|on rank 0") as caught:
        save({**checkpoint, "callbacks": lambda: None}, folder / "at.ckpt", checkpoint_io())
    assert rank == 0 or "on rank 0" in str(caught.value)
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / "text").touch()
    with pytest.raises(UsageError, match="is a folder of something else than a checkpoint"):
        save(checkpoint, folder / "notes", checkpoint_io())
    with pytest.raises(RuntimeError, match="ValueError: 2") as caught:
        on_all_ranks(lambda: (_ for _ in ()).throw(OSError("1") if rank == 0 else RuntimeError("ValueError: 2")))
    assert rank == 1 or str(caught.value) == "RuntimeError: ValueError: 2 (on rank 1)"
    for parameter in module.parameters():
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter.to_local())
    with pytest.raises(UsageError, match=r"AdamW keeps 'exp_avg' of '0\.weight' as a plain tensor of each rank's own"):
        state_by_name(module, optimizer)


def overwritten_in_flight(rank: int, folder: Path) -> None:
    """The thread writes what was there when the save was called, whatever training does meanwhile."""
    module, optimizer = sharded(rank)
    checkpoint = checkpoint_of(module, optimizer)
    expected = whole(checkpoint["state_dict"]), whole(checkpoint["optimizer_states"][0]["state"])
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    overwritten, committed = threading.Event(), []

    def held(*args: Any) -> Any:
        assert overwritten.wait(300)
        return write_shards(*args)

    io = AtomicCheckpointIO(asynchronous=True)
    io.on_commit = committed.append
    writer = FolderWriter(timedelta(seconds=300))
    writer.save(folder / "async.ckpt", shards_to_save(checkpoint), held, record_of(checkpoint), io)
    with torch.no_grad():
        for tensor in [*module.parameters(), *(t for state in optimizer.state.values() for t in state.values())]:
            tensor.fill_(7.0)
    checkpoint["loops"]["seen"][0].fill_(9)
    checkpoint["global_step"] = 99
    assert not (folder / "async.ckpt").exists()
    overwritten.set()
    dist.all_reduce(torch.ones(1))  # of training, while the threads communicate
    writer.save(folder / "second.ckpt", shards_to_save(checkpoint), write_shards, record_of(checkpoint), io)
    assert (folder / "async.ckpt" / "record.json").exists(), "one at a time"
    io.wait()
    assert committed == ([folder / "async.ckpt", folder / "second.ckpt"] if rank == 0 else [])

    def full(*args: Any) -> Any:
        if rank == 1:
            limit_file_size(6000)
        try:
            return write_shards(*args)
        finally:
            unlimited()

    writer.save(folder / "third.ckpt", shards_to_save(checkpoint), full, record_of(checkpoint), io)
    with pytest.raises(OSError, match="too large"):  # on both, and by the next save at the latest
        writer.save(folder / "fourth.ckpt", shards_to_save(checkpoint), write_shards, record_of(checkpoint), io)
    io.on_error = lambda path, error: "skip"
    writer.save(folder / "third.ckpt", shards_to_save(checkpoint), full, record_of(checkpoint), io)
    io.teardown()
    on_rank_0(lambda: None)
    assert {entry.name for entry in folder.glob("*.ckpt")} == {"async.ckpt", "second.ckpt"}
    assert not list(folder.glob(".*.saving"))


def damaged(rank: int, folder: Path) -> None:
    """Both ranks name the damaged file, whichever of them has read it."""
    check_together(folder / "good")
    verify_together(folder / "good")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        check_together(folder / name)
        with pytest.raises(UsageError, match=rf"^damaged: {folder}/{name}/{name} has other bytes") as caught:
            verify_together(folder / name)
        assert "\n" not in str(caught.value)
    for name, start in (("meta.pt", "damaged: "), (".metadata", "damaged: "), ("record.json", "damaged: ")):
        with pytest.raises(UsageError, match=start):
            check_together(folder / name)


def refusals(rank: int, folder: Path) -> None:
    """A checkpoint that one rank cannot open is refused by both."""

    def denied(path: Path) -> None:
        if rank == 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "check_checkpoint", denied)
        with pytest.raises(OSError, match="Permission denied"):
            check_together(folder / "at.ckpt")
    parts = folder / "deepspeed" / "checkpoint"
    if rank == 0:
        parts.mkdir(parents=True)
        (parts / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
        (parts.parent / "latest").touch()
    on_rank_0(lambda: None)
    strategy: Any = SimpleNamespace(broadcast=lambda path: path, lightning_module=None)
    seen = parts.parent if rank == 0 else folder / "elsewhere"
    with pytest.raises(
        UsageError, match=r"elsewhere is no checkpoint folder.*\(on rank 1: a checkpoint lies where all"
    ):
        DeepSpeedZeROStrategy.load_checkpoint(strategy, seen)
    with pytest.raises(OSError, match=r"^boom( \(on rank 1\))?$"):
        on_all_ranks(lambda: (_ for _ in ()).throw(OSError("boom")) if rank == 1 else None)


def broadcasts(rank: int, folder: Path) -> None:
    """Every rank gets rank 0's values of tensors that are not dense too, and no other memory is written."""
    for cut in (lambda base: base[::2], lambda base: base.view(3, 4).t(), lambda base: base[:1].expand(4)):
        base = torch.arange(12.0) + 100 * rank
        before = base.clone()
        broadcast([cut(base)], torch.device("cpu"))
        assert torch.equal(cut(base), cut(torch.arange(12.0)))
        cut(before).copy_(cut(base)) if 0 not in cut(base).stride() else before[:1].copy_(base[:1])
        assert torch.equal(base, before)


def cases(rank: int, folder: Path) -> None:
    for case in (full_disks, other_errors, broadcasts, refusals, overwritten_in_flight):
        place = folder / case.__name__
        place.mkdir(exist_ok=True)
        case(rank, place)


def killed(rank: int, folder: Path) -> None:
    """The second rank dies in the middle of its shards, and the first one cannot go on."""
    module, optimizer = sharded(rank)

    def die(*args: Any) -> None:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        ChecksummedFile.write = die
    save(checkpoint_of(module, optimizer, 4), folder / "at.ckpt", checkpoint_io())


def saved(rank: int, folder: Path, step: int) -> None:
    module, optimizer = sharded(rank)
    save(checkpoint_of(module, optimizer, step), folder / "at.ckpt", checkpoint_io())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two ranks have written; each has compared broadcast tensors, and caught the errors that both must raise."""
    folder = tmp_path_factory.mktemp("folders")
    processes.run(cases, folder)
    return folder


def test_one_ranks_full_disk_or_error_is_every_ranks_and_nobody_waits(folder):
    assert read_record(folder / "full_disks" / "at.ckpt").step == 15
    assert not list((folder / "other_errors").glob("*.ckpt"))


def test_what_a_thread_writes_is_bitwise_what_was_there_when_it_was_called(folder):
    weights, state = torch.load(folder / "overwritten_in_flight" / "expected.pt", weights_only=True)
    found = open_checkpoint(folder / "overwritten_in_flight" / "async.ckpt")
    assert found["state_dict"].keys() == weights.keys()
    assert all(torch.equal(found["state_dict"][name], weights[name]) for name in weights)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for index, entries in found["optimizer_states"][0]["state"].items():
        assert entries.keys() == state[names[index]].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(entries[key], state[names[index]][key]) for key in entries)
        assert entries["step"] == 1.0
    assert (found["global_step"], found["loops"]["seen"][0].tolist()) == (3, [0, 1, 2])


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt", "record.json"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_every_missing_file_is_found(folder, name, tmp_path):
    path = folder / "overwritten_in_flight" / "async.ckpt"
    assert {entry.name for entry in path.iterdir()} == set(FILES)
    assert verify_checkpoint(path) == path
    file, generator = path / name, torch.Generator().manual_seed(0)
    content = file.read_bytes()
    for bit in torch.randint(len(content) * 8, (FLIPS,), generator=generator).tolist():
        flip(file, bit)
        with pytest.raises(UsageError, match=r"^(damaged|incomplete): [^\n]*$"):
            verify_checkpoint(path)
        file.write_bytes(content)
    for left in (content[:-1], content[: len(content) // 2], b"", None):
        file.write_bytes(left) if left is not None else file.unlink()
        with pytest.raises(UsageError, match=r"^(damaged|incomplete): [^\n]*$"):
            verify_checkpoint(path)
        file.write_bytes(content)


def test_ranks_share_the_reading_and_say_the_same(folder, tmp_path):
    for name in ("good", *FILES):
        shutil.copytree(folder / "overwritten_in_flight" / "async.ckpt", tmp_path / name)
        if name != "good":
            flip(tmp_path / name / name, (tmp_path / name / name).stat().st_size * 4)
    processes.run(alone_and_damaged, tmp_path)


def alone_and_damaged(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    damaged(rank, folder)


def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_and_the_next_save_nothing_else(tmp_path):
    processes.run(saved, tmp_path, 3)
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        processes.run(killed, tmp_path)
    (tmp_path / "killed").unlink()
    assert read_record(verify_checkpoint(tmp_path / "at.ckpt")).step == 3
    left = tmp_path / ".at.ckpt.saving"
    if left.exists():
        with pytest.raises(UsageError, match="incomplete"):
            check_checkpoint(left)
    left.mkdir(exist_ok=True)
    (left / "__7_0.distcp").touch()  # of a run with more ranks
    processes.run(saved, tmp_path, 5)
    assert read_record(verify_checkpoint(tmp_path / "at.ckpt")).step == 5
    assert {entry.name for entry in tmp_path.iterdir()} == {"at.ckpt"}
    assert {entry.name for entry in (tmp_path / "at.ckpt").iterdir()} == set(FILES)
