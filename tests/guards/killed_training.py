"""One training of `test_kill_matrix.py`: it writes down every step to the bit, and kills itself where it is told to."""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_tricks.callbacks import ExactResume, SafeCheckpoint
from lightning_tricks.checkpoints.checksummed_file import FileForTorch
from lightning_tricks.data import TokenData
from lightning_tricks.precision import BF16Mixed, FP16Mixed
from lightning_tricks.schedules import ScheduleLR, WarmupCosine
from lightning_tricks.strategies import FSDP2Strategy

STEPS, LENGTH = 8, 8
PRECISION: dict[str, Any] = {"fp32": lambda: [], "bf16": lambda: [BF16Mixed()], "fp16": lambda: [FP16Mixed()]}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    data: str = "tokens"  # or "foreign": a DataLoader that shuffles, and draws random numbers for each row
    workers: int = 0
    accumulate: int = 1
    precision: str = "fp32"
    world: int = 1
    strategy: str = "ddp"  # of more than one process
    asynchronous: bool = False


class Killer:
    """Ends this process at the n-th time that it comes to a place, as a scheduler does that waits no longer."""

    def __init__(self, place: str | None, times: int) -> None:
        self.place, self.times, self.seen = place, times, Counter[str]()

    def here(self, place: str) -> None:
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.times:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_saves(self) -> None:
        """Be there in each write to a checkpoint, and before each call that brings it to the disk."""
        replace(FileForTorch, "write", lambda write: lambda *args: (self.here("save"), write(*args))[1])
        replace(os, "fsync", lambda fsync: lambda *args: (self.here("fsync"), fsync(*args))[1])


def replace(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Put what `wrapped` makes of a function in its place."""
    setattr(owner, name, wrapped(getattr(owner, name)))


class Model(pl.LightningModule):
    """A module that knows nothing of us, with dropout. It appends a line a step and a line a validation."""

    def __init__(self, log: Path, killer: Killer) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)])
        self.head = nn.Linear(16, 64)
        self.log_file, self.killer = log, killer
        self.window: list[list[str]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else (batch, batch)
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.killer.here("step")
        if self.window:
            self.killer.here("window")
        loss = self.loss(batch)
        ids = batch["input_ids"] if isinstance(batch, dict) else batch
        rows = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12]
        self.window.append([rows, loss.item().hex()])
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm: Any = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.window.append([norm.item().hex(), optimizer.param_groups[0]["lr"].hex()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.write("step", self.window)
            self.window = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.killer.here("validation")
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.write("validation", self.trainer.callback_metrics["val/loss"].item().hex())

    def write(self, what: str, content: Any) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps([what, self.trainer.global_step, content]) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": ScheduleLR(optimizer, WarmupCosine(warmup_steps=3), STEPS),
                "interval": "step",
            },
        }


class Rows(Dataset):
    """Rows of tokens with a random shift, as an augmentation draws it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index * 7 + torch.arange(LENGTH) + torch.randint(0, 64, ())) % 64


def loaders(case: Case, folder: Path) -> dict[str, Any]:
    """The `fit` arguments that bring the data."""
    if case.data == "foreign":
        return {
            "train_dataloaders": DataLoader(Rows(24), batch_size=2, shuffle=True, num_workers=case.workers),
            "val_dataloaders": DataLoader(torch.arange(4 * LENGTH).view(4, LENGTH) % 64, batch_size=2),
        }
    files = {name: str(folder.parent / f"{name}.bin") for name in ("train", "val")}
    return {"datamodule": TokenData(**files, seq_len=LENGTH, micro_batch_size=2, num_workers=case.workers, seed=3)}


def run(folder: Path, case: Case, kill: tuple[str, int] = ("", 0), rank: int = 0, port: int = 0) -> None:
    """Train to the last step, from `last.ckpt` if there is one; at the end write the hash of the weights."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # workers of a fork server would outlive this process
    options: dict[str, Any] = {}
    if case.world > 1:
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": case.world,
            "LOCAL_RANK": rank,
            "NODE_RANK": 0,
        }
        os.environ.update({name: str(value) for name, value in env.items()})
        options = {"devices": case.world, "strategy": FSDP2Strategy() if case.strategy == "fsdp2" else case.strategy}
    killer = Killer(*kill)
    if kill[0] in ("save", "fsync"):
        killer.watch_saves()
    pl.seed_everything(5, verbose=False)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=2 * case.accumulate,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        accelerator="cpu",
        plugins=PRECISION[case.precision](),
        callbacks=[
            SafeCheckpoint(folder / "saved", every_n_train_steps=2, keep_last=2, asynchronous=case.asynchronous),
            *([ExactResume()] if case.data == "foreign" else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Model(folder / f"log.{rank}", killer)
    last = folder / "saved" / "last.ckpt"
    trainer.fit(module, **loaders(case, folder), ckpt_path=last if last.exists() else None)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    weights = b"".join(p.detach().numpy().tobytes() for p in whole)
    module.write("weights", hashlib.sha256(weights).hexdigest())
    os._exit(0)  # some builds abort while they tear the process group down
