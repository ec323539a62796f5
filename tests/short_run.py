"""A short training run whose metrics tell which run and which step wrote them, for the tests of loggers."""

import time
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.data import DataLoader

from lightning_tricks._trainer.lightning import pl


class Model(pl.LightningModule):
    """One linear layer; logs `train/loss` as 1000 * run + step of Lightning's loggers, and `val/loss` likewise."""

    def __init__(self, run: int = 1, manual: bool = False) -> None:
        super().__init__()
        self.run, self.automatic_optimization = run, not manual
        self.layer = torch.nn.Linear(2, 1)

    def mark(self) -> float:
        return 1000.0 * self.run + self.trainer.fit_loop.epoch_loop._batches_that_stepped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", self.mark())
        loss = self.layer(batch).pow(2).mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.mark())

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


class Raise(pl.Callback):
    """Fail in the middle of the step after `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.fit_loop.epoch_loop._batches_that_stepped == self.steps:
            raise RuntimeError("power cut")


def fit(
    loggers: Any, steps: int, *, model: Any = None, callbacks: tuple = (), ckpt_path: Any = None, **options: Any
) -> Any:
    """Train `steps` steps on fixed data, with validation every fifth step; returns the Trainer."""
    _wait_for_a_later_second(loggers if isinstance(loggers, list) else [loggers])
    torch.manual_seed(0)
    model, data = model or Model(), torch.randn(120, 2, generator=torch.Generator().manual_seed(1))
    defaults = {"log_every_n_steps": 1, "val_check_interval": 5, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=loggers, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, **{"devices": 1, "enable_checkpointing": False, **defaults, **options},
    )  # fmt: skip
    trainer.fit(model, DataLoader(data), DataLoader(data), ckpt_path=ckpt_path)
    return trainer


def _wait_for_a_later_second(loggers: list[Any]) -> None:
    """TensorBoard sorts the event files of a folder by the second at which they were opened, which is in their name."""
    folders = {logger.save_dir for logger in loggers if getattr(logger, "save_dir", None)}
    files = [path.name for folder in folders for path in Path(folder).rglob("*tfevents*")]
    newest = max((int(name.partition("tfevents.")[2].partition(".")[0]) for name in files), default=0)
    while int(time.time()) <= newest:
        time.sleep(0.05)


def save_every(steps: int, folder: Path) -> Any:
    """A ModelCheckpoint that keeps `folder/step=N.ckpt` of each multiple."""
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1)


def events(folder: Path) -> EventAccumulator:
    """All points of a folder, as TensorBoard's `event_accumulator` reads them."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def tensors(folder: Path) -> plugin_event_accumulator.EventAccumulator:
    """The points of a folder as TensorBoard itself reads them; it drops points by other rules than `events`."""
    return plugin_event_accumulator.EventAccumulator(str(folder)).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a series as TensorBoard shows it, in either of its Python readers."""
    shown = [(event.step, event.value) for event in events(folder).Scalars(tag)]
    assert shown == [(event.step, make_ndarray(event.tensor_proto).item()) for event in tensors(folder).Tensors(tag)]
    return shown
