"""A run of a tiny foreign LightningModule that writes down its batches and can kill itself (for test_resume.py)."""

import hashlib
import logging
import multiprocessing
import os
import signal
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks.data import TokenData


class Recorder(pl.LightningModule):
    """Appends one line a micro-batch: step, micro-batch within the step, hash of its rows."""

    def __init__(self, log: Path, kill_at: tuple[int, int] | None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        self.log_file, self.kill_at, self.micro, self.last = log, kill_at, 0, -1

    def loss(self, batch):
        logits = self.embedding(batch["input_ids"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step
        self.micro = self.micro + 1 if step == self.last else 0
        self.last = step
        rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:12] for row in batch["input_ids"]]
        with self.log_file.open("a") as file:
            file.write(f"{step} {self.micro} {self.trainer.global_rank} {' '.join(rows)}\n")
        if self.kill_at == (step, self.micro):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            with self.log_file.with_suffix(".val").open("a") as file:
                file.writelines(f"{row.tolist()}\n" for row in batch["labels"] if (row >= 0).any())
        self.log("val/loss", self.loss(batch))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking and self.trainer.is_global_zero:
            with self.log_file.open("a") as file:
                file.write(f"{self.trainer.global_step} validation in epoch {self.trainer.current_epoch}\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    folder: Path,
    kill_at: tuple[int, int] | None = None,
    accumulate: int = 1,
    num_workers: int = 0,
    max_steps: int = 8,
    checkpoint: dict | None = None,
    log: str = "batches.txt",
    rank: int = 0,
    world: int = 1,
    port: int = 0,
    **trainer_options,
) -> None:
    """Train on `folder`/train.bin from `folder`/run/last.ckpt, if there, to `max_steps`; log into `folder`/`log`."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # loader workers forked from here see this process die; those of a fork server would live on
    multiprocessing.set_start_method("fork", force=True)
    if world > 1:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_RANK": rank, "NODE_RANK": 0}
        os.environ.update({name: str(value) for name, value in env.items()})
        trainer_options |= {"strategy": "ddp", "devices": world}
    micro_batch_size = trainer_options.pop("micro_batch_size", 2)
    data = TokenData(
        train=str(folder / "train.bin"),
        val=str(folder / "val.bin"),
        seq_len=8,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
        seed=3,
    )
    saver = ModelCheckpoint(folder / "run", save_last=True, **(checkpoint or {"every_n_train_steps": 2}))
    trainer = pl.Trainer(
        max_steps=max_steps or -1,
        accumulate_grad_batches=accumulate,
        callbacks=[saver],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"val_check_interval": 2 * accumulate, "check_val_every_n_epoch": None} | trainer_options),
    )
    module = Recorder(folder / log, kill_at)
    trainer.fit(module, data, ckpt_path="last" if (folder / "run" / "last.ckpt").exists() else None)
    if world > 1:
        os._exit(0)  # some builds abort while they tear the process group down
