"""A run of a foreign LightningModule with foreign loaders that writes down every bit and can kill itself."""

import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from harness.runs import trainer_with
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_tricks import ExactResume, FSDP2Strategy


def noisy(row: int, own: np.random.Generator | None = None) -> torch.Tensor:
    """Augmentation from every source of random numbers."""
    noise = torch.randn(4) + float(np.random.normal()) + random.random()
    return noise + row + (0.0 if own is None else float(own.normal()))


class Rows(Dataset):
    def __init__(self, n: int) -> None:
        self.n, self.own = n, np.random.default_rng(7)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> torch.Tensor:
        return noisy(row, self.own)


class Numbers(Rows):
    """Rows that say which they are."""

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((4,), float(row))


class Stream(IterableDataset):
    """Rows of its own process and worker; without a length unless `sized`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def share(self) -> range:
        info = get_worker_info()
        rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        return range(rank * workers + worker, self.n, world * workers)

    def __iter__(self):
        rows = list(self.share())
        random.shuffle(rows)
        for row in rows:
            yield noisy(row)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class StatefulStream(Stream):
    """Goes on from its state; `read` counts the rows that were made."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done, self.read = 0, 0

    def __iter__(self):
        rows = list(self.share())
        while self.done < len(rows):
            self.done += 1
            self.read += 1
            yield noisy(rows[self.done - 1])
        self.done = 0

    def state_dict(self) -> dict:
        return {"done": self.done}

    def load_state_dict(self, state: dict) -> None:
        self.done = state["done"]


class Whim(Sampler):
    """Draws from the global generators for each row."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield (random.randrange(self.n) + int(torch.randint(self.n, ())) + np.random.randint(self.n)) % self.n


def loaders(kind: str):
    """Each kind of training data. 11 or more batches of 2 rows an epoch."""
    kind, _, workers = kind.partition("/")
    plain = partial(DataLoader, batch_size=2, num_workers=int(workers or 0))
    shuffled = partial(plain, shuffle=True)
    return {
        "shuffle": lambda: shuffled(Rows(23)),
        "generator": lambda: shuffled(Rows(23), generator=torch.Generator().manual_seed(5)),
        "whim": lambda: plain(Rows(23), sampler=Whim(23)),
        "rows": lambda: shuffled(Rows(12), batch_size=None),
        "stream": lambda: plain(Stream(23)),
        "sized": lambda: plain(SizedStream(24)),
        "stateful": lambda: plain(StatefulStream(23)),
        "torchdata": lambda: StatefulDataLoader(Rows(23), shuffle=True, **plain.keywords),
        "numbers": lambda: shuffled(Numbers(24)),
        "two": lambda: {"a": shuffled(Rows(23)), "b": shuffled(Rows(9))},
    }[kind]()


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()[:16]


class Foreign(pl.LightningModule):
    def __init__(self, log: Path, kill_at: int | None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.log_file, self.kill_at = log, kill_at

    def say(self, **values) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def training_step(self, batch, batch_idx):
        batches = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        loss = sum(self.net(b.view(-1, 4)).square().mean() for b in batches) * 1e-3
        done = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.say(
            batch=done, epoch=self.trainer.current_epoch, index=batch_idx, data=digest(batches), loss=loss.item().hex(),
            rows=batches[0].view(-1, 4)[:, 0].tolist(),
        )  # fmt: skip
        if self.kill_at == done:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def on_before_optimizer_step(self, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        norm = getattr(norm, "full_tensor", lambda: norm)()
        self.say(step=self.trainer.global_step, norm=norm.item().hex(), lr=optimizer.param_groups[0]["lr"])

    def on_train_epoch_start(self):
        self.say(epoch_start=self.trainer.current_epoch, draw=torch.rand(()).item())

    def on_train_epoch_end(self):
        self.say(epoch_end=self.trainer.current_epoch)

    def on_train_start(self):
        torch.rand(3), random.random(), np.random.rand()  # a resumed run draws these once more

    def validation_step(self, batch, batch_idx):
        if self.kill_at == -self.trainer.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("val", self.net(batch.view(-1, 4)).mean())

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.say(validation=self.trainer.global_step, epoch=self.trainer.current_epoch)

    def on_train_end(self):
        self.say(weights=digest(getattr(p, "full_tensor", lambda p=p: p)() for p in self.parameters()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(folder: Path, kind: str, kill_at: int | None = None, saver: Any = None, **options) -> None:
    """Train from `folder`/last.ckpt, if there, to the end; log into `folder`/log.RANK.

    Args:
        folder: of the run.
        kind: of the data, see `loaders`.
        kill_at: number of a micro-batch, from 1; -N for the validation after step N.
        saver: options of ModelCheckpoint, or a function of the folder that makes another one.
        options: of the run, most of them the Trainer's.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # workers see this process die
    rank, world = options.pop("rank", 0), options.pop("world", 1)
    if world > 1:
        port = options.pop("port")
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_RANK": rank, "NODE_RANK": 0}
        os.environ.update({name: str(value) for name, value in env.items()})
        options = {"strategy": "ddp", "devices": world} | options
        if options["strategy"] == "fsdp2":
            options["strategy"] = FSDP2Strategy()
    pl.seed_everything(3, verbose=False)
    folder.mkdir(exist_ok=True)
    if not callable(saver):
        settings = {"every_n_train_steps": 2, "save_top_k": 0, "save_last": True} | (saver or {})
        saver = partial(ModelCheckpoint, **settings)
    defaults = {"max_epochs": 2, "max_steps": -1, "num_sanity_val_steps": 0, "logger": False}
    trainer, last = trainer_with(saver(folder), ExactResume(), **defaults | options), folder / "last.ckpt"
    feed = loaders(kind), DataLoader(torch.ones(2, 4))
    trainer.fit(Foreign(folder / f"log.{rank}", kill_at), *feed, ckpt_path=last if last.exists() else None)
    if world > 1:
        os._exit(0)  # some builds abort while they tear the process group down


def said(folder: Path, rank: int = 0) -> dict:
    """The last line about each batch, step, validation and epoch."""
    result = {}
    for line in (folder / f"log.{rank}").read_text().splitlines():
        values = json.loads(line)
        first = next(iter(values))
        result[first, values[first] if first != "weights" else 0] = values
    return result


def run_all(folder: Path, cases: dict) -> None:
    """Several runs that nobody kills, one after the other."""
    for name, (kind, options) in cases.items():
        run(folder / name, kind, **options)
