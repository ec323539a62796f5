"""SafeCheckpoint over folders of shards: what it keeps, at once and in the background, and the run that goes on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign import CausalLM, rows
from harness import processes

from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.record import KEY, read_record
from lightning_tricks.strategies import FSDP2Strategy

pytestmark = pytest.mark.long


def go_on_in_one_process(folder: Path) -> list[float]:
    """The losses of three steps more, without a strategy; the saver keeps its checkpoints elsewhere."""
    model, saver = CausalLM(), SafeCheckpoint(folder.with_name(f"{folder.name}, one process"))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=12, logger=False, callbacks=[saver], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, rows(0, 1), ckpt_path=folder / "last.ckpt")
    return model.losses


def fit(rank: int, folder: Path, asynchronous: bool, **options: Any) -> list[float]:
    model, saver = CausalLM(), SafeCheckpoint(folder, every_n_train_steps=3, keep_last=2, asynchronous=asynchronous)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=FSDP2Strategy(), max_steps=9, logger=False, callbacks=[saver],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, rows(rank, 2), **options)
    torch.distributed.barrier()  # rank 0 deletes
    return model.losses


def saved_and_resumed(rank: int, folder: Path) -> None:
    for asynchronous in (False, True):
        place = folder / f"asynchronous {asynchronous}"
        losses = fit(rank, place, asynchronous)
        assert {path.name for path in place.iterdir()} == {"step=6.ckpt", "step=9.ckpt", "last.ckpt"}
        again = fit(rank, place, not asynchronous, ckpt_path=place / "step=6.ckpt")
        assert again == losses[6:]


def test_the_two_newest_folders_stay_whole_and_a_run_goes_on_from_either(tmp_path):
    processes.run(saved_and_resumed, tmp_path)
    for place in tmp_path.iterdir():
        for step in (6, 9):
            record = read_record(verify_checkpoint(place / f"step={step}.ckpt"))
            assert (record.step, record.finite) == (step, True)
        assert (place / "last.ckpt").resolve() == (place / "step=9.ckpt").resolve()
    sharded = tmp_path / "asynchronous False"
    added = torch.load(sharded / "last.ckpt/meta.pt", weights_only=True)[KEY]
    assert added["module"] == "CausalLM"  # and not the class of torch that `fully_shard` has given it
    assert len(go_on_in_one_process(sharded)) == 3
