"""SafeCheckpoint on two ranks, and with the other Lightning package."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.preloaded import python
from harness.processes import run
from harness.runs import trainer_with
from harness.token_files import write_token_files

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import SafeCheckpoint
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.data import TokenData

pytestmark = pytest.mark.long


class Model(pl.LightningModule):
    """An embedding with dropout; notes each loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = torch.nn.Embedding(64, 64), torch.nn.Dropout(0.3)
        self.losses: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.dropout(self.embedding(batch["input_ids"]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append((self.trainer.global_step, loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(data: Path, saver: Any, steps: int, ckpt_path: Any = None, **options: Any) -> Any:
    torch.manual_seed(0 if ckpt_path is None else 99)
    trainer = trainer_with(saver, max_steps=steps, **{"logger": False, "limit_val_batches": 0, **options})
    files = {name: str(data / f"{name}.bin") for name in ("train", "val")}
    loader = TokenData(**files, seq_len=8, micro_batch_size=2, seed=3)
    model = Model()
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer, model


def two_ranks(rank: int, folder: Path, data: Path) -> None:
    ddp = {"strategy": "ddp", "devices": 2}
    saver = SafeCheckpoint(folder / "a", every_n_train_steps=3, every_n_minutes=1e-9, keep_last=9)
    trainer, whole = fit(data, saver, 6, log_every_n_steps=2, **ddp)
    assert sorted(read_record(path).step for path in (folder / "a").glob("step*")) == [2, 3, 4, 6]
    assert saver.last_model_path == str(folder / "a" / "last.ckpt")  # on each rank
    states = torch.load(folder / "a" / "step=3.ckpt", weights_only=True)["random_states"]
    assert len(states) == 2
    later = SafeCheckpoint(folder / "b")
    _, resumed = fit(data, later, 6, folder / "a" / "step=3.ckpt", **ddp)
    assert saver._run == later._run == read_record(folder / "a" / "step=3.ckpt").run  # on each rank
    assert resumed.losses == whole.losses[3:]  # with each rank's own dropout
    # one rank's NaN is every rank's
    with torch.no_grad():
        trainer.lightning_module.embedding.weight[0, 0] = float("nan") if rank == 1 else 0.0
    assert saver._new_record(trainer, permanent=False).finite is False


def test_two_ranks_save_and_resume_together(tmp_path):
    run(two_ranks, tmp_path, write_token_files(tmp_path))


CLASSIC = """
import sys
import pytorch_lightning as pl, torch
from lightning_tricks import SafeCheckpoint
from torch.utils.data import DataLoader
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
for steps, path in ((4, None), (6, "saved/last.ckpt")):
    trainer = pl.Trainer(max_steps=steps, callbacks=[SafeCheckpoint("saved", every_n_train_steps=2)], **quiet)
    trainer.fit(Model(), DataLoader(torch.ones(99, 2)), ckpt_path=path)
    assert len(trainer.checkpoint_callbacks) == 1
"""


def test_it_works_with_the_package_pytorch_lightning(tmp_path):
    subprocess.run([python("pytorch_lightning"), "-c", CLASSIC], cwd=tmp_path, check=True)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"step=4.ckpt", "step=6.ckpt", "last.ckpt"}
