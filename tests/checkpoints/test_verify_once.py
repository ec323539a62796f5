"""Each byte of a checkpoint is verified once on a host, by the first of its ranks."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import Small
from harness.processes import run
from harness.runs import trainer_with

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import check_bytes
from lightning_tricks.checkpoints.write_file import write_file
from lightning_tricks.cli.choose_checkpoint import choose_once

pytestmark = pytest.mark.long

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
        line = ""
        try:
            io.load_checkpoint(folder / "damaged.ckpt")
        except UsageError as error:
            line = str(error)
        dist.barrier()
        return read, weights, line


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(9).numpy().tobytes())] ^= 1
    path.write_bytes(content)


def test_the_first_of_two_ranks_reads_the_bytes_and_refuses_damage(tmp_path):
    for name in ("whole.ckpt", "damaged.ckpt"):
        write_file(CONTENT, tmp_path / name)
    damage(tmp_path / "damaged.ckpt")
    first, other = run(load_twice_then_a_damaged_one, tmp_path)
    assert first[:2] == (["whole.ckpt", "whole.ckpt", "damaged.ckpt"], [9.0, 9.0])
    assert first[2].startswith(f"damaged: {tmp_path}/damaged.ckpt has other bytes in ")
    assert other == ([], [9.0, 9.0], "")


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


def refuse(rank: int, folder: Path) -> str:
    os.chdir(folder)
    trainer = trainer_with(SafeCheckpoint("saved"), devices=2, strategy="ddp", plugins=[AtomicCheckpointIO()])
    with pytest.raises(UsageError) as error:
        choose_once("fit", {"resume": "auto"}, trainer)
    return str(error.value)


def test_what_the_first_rank_refuses_all_refuse(tmp_path):
    write_file(CONTENT, tmp_path / "saved" / "step=4.ckpt")
    damage(tmp_path / "saved" / "step=4.ckpt")
    (line,) = set(run(refuse, tmp_path))
    assert line.startswith("resume=auto: the only checkpoint in saved cannot be used (the newest: saved/step=4.ckpt")
