"""Each byte of a checkpoint is verified once on a host, however many of a run's ranks load it."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import Small
from harness.processes import run
from harness.runs import trainer_with

from lightning_tricks._errors import UsageError
from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import check_bytes
from lightning_tricks.checkpoints.write_file import write_file
from lightning_tricks.cli.choose_checkpoint import choose_once

CONTENT = {"pytorch-lightning_version": "2.6.0", "state_dict": {"weight": torch.ones(9)}, "lr_schedulers": []}


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose bytes this process compares from now on."""
    module = sys.modules[check_bytes.__module__]
    read, real = [], module.damage
    patch.setattr(module, "damage", lambda path, record: read.append(path.name) or real(path, record))
    return read


def load_twice_then_a_damaged_one(rank: int, folder: Path) -> tuple[list[str], list[float], str]:
    with pytest.MonkeyPatch.context() as patch:
        dist.init_process_group("gloo")
        read, io = counted(patch), AtomicCheckpointIO()
        weights = [io.load_checkpoint(folder / "whole.ckpt")["state_dict"]["weight"].sum().item() for _ in range(2)]
        try:
            io.load_checkpoint(folder / "damaged.ckpt")
        except UsageError as error:
            line = str(error)
        dist.barrier()  # rank 0 holds the store, and would leave with it
        return read, weights, line


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(9).numpy().tobytes())] ^= 1
    path.write_bytes(content)


def test_one_of_three_ranks_reads_for_all_and_all_take_its_answer(tmp_path):
    for name in ("whole.ckpt", "damaged.ckpt"):
        write_file(CONTENT, tmp_path / name)
    damage(tmp_path / "damaged.ckpt")
    found = run(load_twice_then_a_damaged_one, tmp_path, world=3)
    assert sorted(name for read, *_ in found for name in read) == ["damaged.ckpt", "whole.ckpt", "whole.ckpt"]
    assert {tuple(weights) for _, weights, _ in found} == {(9.0, 9.0)}
    (line,) = {line for *_, line in found}
    assert line.startswith(f"damaged: {tmp_path}/damaged.ckpt has other bytes in ")


def test_a_rank_that_loads_alone_waits_for_nobody(tmp_path):
    write_file(CONTENT, tmp_path / "whole.ckpt")
    assert sorted(run(load_on_one, tmp_path)) == [0, 2]


def load_on_one(rank: int, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        dist.init_process_group("gloo")
        read = counted(patch)
        for _ in range(2 * (rank == 0)):
            AtomicCheckpointIO().load_checkpoint(folder / "whole.ckpt")
        dist.barrier()
        return len(read)


def resume(rank: int, folder: Path) -> tuple[list[str], str, int]:
    """What `resume: auto` does under torchrun: each rank chooses before there is a process group, then loads."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        read, plugin = counted(patch), AtomicCheckpointIO()
        options = {"devices": 2, "strategy": "ddp", "plugins": [plugin], "max_steps": 6}
        trainer = trainer_with(SafeCheckpoint("saved", every_n_train_steps=2), **options)
        path = choose_once("fit", {"resume": "auto"}, trainer)
        trainer.fit(Small(), ckpt_path=path)
        return read, os.path.realpath(path), trainer.global_step


def test_a_run_that_a_launcher_resumes_reads_what_it_chooses_once_and_nothing_at_the_load(tmp_path):
    trainer_with(SafeCheckpoint(tmp_path / "saved", every_n_train_steps=2)).fit(Small())
    newest = tmp_path / "saved" / "step=4.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    found = run(resume, tmp_path)
    assert sorted(name for read, *_ in found for name in read) == ["step=2.ckpt", "step=4.ckpt"]
    assert {path for _, path, _ in found} == {str(tmp_path / "saved" / "step=2.ckpt")}
    assert [step for *_, step in found] == [6, 6]
