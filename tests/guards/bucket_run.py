"""A run that saves to a bucket, in one process or as two ranks of FSDP2, and goes on from what `auto` finds there."""

import json
import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness.models import Small, adamw, batches, rows
from harness.runs import trainer_with, whole

from lightning_tricks import FSDP2Strategy, SafeCheckpoint
from lightning_tricks._host import address
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.cli.choose_checkpoint import choose_checkpoint

DATA = batches([rows(4, 4)] * 99)  # all the same: a loader would begin with its first one at a resume
STEPS = 5
Result = tuple[list[float], list[torch.Tensor]]


class Noisy(Small):
    """With dropout, whose random numbers a resumed run must go on with."""

    def __init__(self) -> None:
        super().__init__(4, 8, 1, dropout=0.5, optimizer=adamw)


def newest(saver: SafeCheckpoint) -> str | None:
    """What `--resume auto` takes."""
    strategy = SimpleNamespace(checkpoint_io=AtomicCheckpointIO())
    trainer = SimpleNamespace(checkpoint_callbacks=[saver], fast_dev_run=False, strategy=strategy, logger=None)
    return choose_checkpoint("fit", None, trainer, "auto")


def train(place: str, cache: Path, world: int, told: Any = None, **options: Any) -> Result:
    """Go on with the newest checkpoint to the end; the losses of this process's steps, and the weights."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    address.WAITS_SECONDS = (0, 0)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    saver = SafeCheckpoint(place, every_n_train_steps=1, keep_last=1, permanent_steps=3)
    path = newest(saver)
    options = {"strategy": FSDP2Strategy(), "devices": world, **options} if world > 1 else {}
    torch.manual_seed(0)
    trainer, model = trainer_with(saver, max_steps=STEPS, logger=False, **options), Noisy()
    if told is not None:
        told(os.getpid())
    trainer.fit(model, DATA, ckpt_path=path)
    return model.losses, [whole(parameter) for parameter in model.parameters()]


def ranks(rank: int, place: str, cache: Path, told: Path) -> Result:
    """One of two ranks, which writes down its process."""
    return train(place, cache, 2, lambda pid: (told / str(rank)).write_text(json.dumps(pid)))


def hosts(rank: int, place: str, cache: Path) -> Result:
    """The only process of one of two hosts, which share no disk."""
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    FSDP2Strategy.broadcast = lambda self, value, src=0: (  # type: ignore[method-assign]
        value if isinstance(value, Path) else pl.strategies.ModelParallelStrategy.broadcast(self, value, src)
    )
    return train(place, cache / str(rank), 2, num_nodes=2, devices=1)


def alone(rank: int, place: str, cache: Path, told: Path) -> Result:
    """One process, which writes it down."""
    return train(place, cache, 1, lambda pid: (told / "0").write_text(json.dumps(pid)))
