"""The runs of `test_kill_matrix.py`: each kills itself, or finds its disk full, at the moment that it is told."""

import errno
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness.models import Small, adamw
from harness.runs import trainer_with
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_tricks.callbacks import ExactResume, SafeCheckpoint
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.record import read_record
from lightning_tricks.checkpoints.write_file import FileForTorch
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


class Moments:
    """Counts the times that this process comes to a place, and ends it, or lets its disk be full, at one of them.

    Args:
        place: `step`, `window` or `validation`, which a model tells by `here`; `save`, each write into a checkpoint;
            `fsync`, before each; `files`, before each of these and before and after each change of a name.
        number: of the time at which it happens, from 1.
        kind: SIGKILL, as a scheduler sends that waits no longer, or ENOSPC.
    """

    def __init__(self, place: str = "", number: int = 0, kind: str = "SIGKILL") -> None:
        self.place, self.number, self.kind, self.seen = place, number, kind, Counter[str]()

    def here(self, place: str) -> None:
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.number:
            if self.kind == "ENOSPC":
                raise OSError(errno.ENOSPC, "No space left on device")
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Be there whenever this process changes a file."""

        def streamed(write: Any) -> Any:
            def written(file: Any, data: Any) -> Any:
                if file.file.tell() % 3:
                    file.file.flush()  # so that a part of what was written is in the file
                try:
                    self.here("save")
                    self.here("files")
                except OSError as error:
                    file.error = error  # as the real write does, for torch raises another one
                    raise
                return write(file, data)

            return written

        def around(call: Any, *places: str, then: tuple[str, ...] = ()) -> Any:
            def called(*args: Any, **options: Any) -> Any:
                for place in places:
                    self.here(place)
                result = call(*args, **options)
                for place in then:
                    self.here(place)
                return result

            return called

        FileForTorch.write = streamed(FileForTorch.write)
        os.fsync = around(os.fsync, "fsync", "files")
        for owner, names in CHANGES.items():
            for name in names:
                setattr(owner, name, around(getattr(owner, name), "files", then=("files",)))


CHANGES: dict[Any, tuple[str, ...]] = {Path: ("replace", "rename", "unlink", "symlink_to"), shutil: ("rmtree",)}


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def save_once_more(folder: Path, how: str, asynchronous: bool) -> None:
    """Write a checkpoint one step newer than the newest of the folder."""
    if how == "file":
        path, io = folder / "last.ckpt", AtomicCheckpointIO(asynchronous)
        step = read_record(path).step + 1 if path.exists() else 0
        io.save_checkpoint({"global_step": step, "state_dict": {"weight": torch.full((100,), float(step))}}, path)
        io.wait()
        return
    last = folder / "last.ckpt"
    done = read_record(last).step if last.exists() else 0
    saver = SafeCheckpoint(folder, every_n_train_steps=1, keep_last=1, asynchronous=asynchronous)
    trainer_with(saver, max_steps=done + 2).fit(Small(optimizer=adamw), ckpt_path=last if done else None)


class Model(pl.LightningModule):
    """A module that knows nothing of us, with dropout. It appends a line a step and a line a validation."""

    def __init__(self, log: Path, moments: Moments) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)])
        self.head = nn.Linear(16, 64)
        self.log_file, self.moments = log, moments
        self.window: list[list[str]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        ids, labels = (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else (batch, batch)
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.moments.here("step")
        if self.window:
            self.moments.here("window")
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
            self.moments.here("validation")
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.write("validation", self.trainer.callback_metrics["val/loss"].item().hex())

    def write(self, what: str, content: Any) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps([what, self.trainer.global_step, content]) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = ScheduleLR(optimizer, WarmupCosine(warmup_steps=3), STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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
    be_quiet()
    multiprocessing.set_start_method("fork", force=True)  # workers of a fork server would outlive this process
    options: dict[str, Any] = {}
    if case.world > 1:
        group = {"MASTER_PORT": port, "WORLD_SIZE": case.world, "LOCAL_RANK": rank, "NODE_RANK": 0}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in group.items()}})
        options = {"devices": case.world, "strategy": FSDP2Strategy() if case.strategy == "fsdp2" else case.strategy}
    moments = Moments(*kill)
    moments.watch()
    pl.seed_everything(5, verbose=False)
    saver = SafeCheckpoint(folder / "saved", every_n_train_steps=2, keep_last=2, asynchronous=case.asynchronous)
    trainer = trainer_with(
        saver, *([ExactResume()] if case.data == "foreign" else []), max_steps=STEPS, logger=False,
        accumulate_grad_batches=case.accumulate, val_check_interval=2 * case.accumulate, check_val_every_n_epoch=None,
        gradient_clip_val=1.0, plugins=PRECISION[case.precision](), **options,
    )  # fmt: skip
    module = Model(folder / f"log.{rank}", moments)
    last = folder / "saved" / "last.ckpt"
    trainer.fit(module, **loaders(case, folder), ckpt_path=last if last.exists() else None)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    weights = b"".join(p.detach().numpy().tobytes() for p in whole)
    module.write("weights", hashlib.sha256(weights).hexdigest())
    os._exit(0)  # some builds abort while they tear the process group down
