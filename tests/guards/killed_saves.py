"""A run that saves at every step and waits to be killed (for test_kills_in_saves.py)."""

import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_tricks._lightning import pl
from lightning_tricks.callbacks import SafeCheckpoint


class Heavy(pl.LightningModule):
    """One weight, and 2 MB to save with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("ballast", torch.arange(2.0**19))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight - 1).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.weight], lr=0.01)


class SaysWhenItSaves(pl.Callback):
    """Sends the step at the start of each save."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.connection.send(trainer.global_step)


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("this file system has no links")


def run(folder: Path, temporary: Path, connection: Any, last: str, asynchronous: bool) -> None:
    """Train from `last.ckpt`, if there, for ever."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tempfile.tempdir = str(temporary)
    if last == "copy":
        os.symlink = os.link = refuse
    saver = SafeCheckpoint(folder, every_n_train_steps=1, keep_last=1, asynchronous=asynchronous)
    trainer = pl.Trainer(
        max_steps=10**6, callbacks=[saver, SaysWhenItSaves(connection)], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    ckpt_path = folder / "last.ckpt"
    trainer.fit(Heavy(), DataLoader(torch.zeros(10**6, 1)), ckpt_path=ckpt_path if ckpt_path.exists() else None)
