"""Runs whose weights or optimizer state a batch destroys, on data that are addressed by position."""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from harness.runs import trainer_with
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_tricks import SpikeRollback
from lightning_tricks._core.tensors import local

ROWS = 16  # of a step
QUICK: dict[str, Any] = {"patience_steps": 5, "window_steps": 32, "snapshot_every_n_steps": 20}


def batch_of(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """A line with noise: the loss cannot fall below 0.25."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.5 * torch.randn(ROWS, 1, generator=generator)


class ByPosition:
    """A loader that finds its place by the step."""

    addressed_by_position = True

    def __init__(self, trainer: Any, spoil: Any) -> None:
        self.trainer, self.spoil = trainer, spoil

    def __iter__(self) -> Any:
        micro_batch = self.trainer.global_step * (every := self.trainer.accumulate_grad_batches)
        while True:
            yield self.spoil(micro_batch // every, *batch_of(micro_batch, self.trainer.global_rank))
            micro_batch += 1


class Data(pl.LightningDataModule):
    """`spoil(step, x, y)` may change a batch; sample positions are known if `positions`."""

    def __init__(self, spoil: Any = None, positions: bool = True) -> None:
        super().__init__()
        self.spoil = spoil or (lambda step, x, y: (x, y))
        if positions:
            self.step_samples = lambda: [(self.trainer.global_step * ROWS, self.trainer.global_step * ROWS + ROWS - 1)]

    def train_dataloader(self) -> ByPosition:
        return ByPosition(self.trainer, self.spoil)


def nan_at(*steps: int) -> Any:
    return lambda step, x, y: (x * math.nan, y) if step in steps else (x, y)


def huge_at(*steps: int) -> Any:
    """Such a batch ruins Adam's second moments: its steps are too small for about 1000 steps after it."""
    return lambda step, x, y: (x, y * 1e4) if step in steps else (x, y)


class Model(pl.LightningModule):
    """Dropout, so that a random number more or less would show; a learning rate that falls over the run."""

    def __init__(self, optimizer: str = "AdamW", steps: int = 200) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.01), nn.Linear(16, 1))
        self.optimizer, self.steps = optimizer, steps
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {
            "AdamW": lambda: torch.optim.AdamW(self.parameters(), lr=0.03, foreach=True),
            "fused": lambda: torch.optim.AdamW(self.parameters(), lr=0.03, fused=True),
            "momentum": lambda: torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9),
        }
        optimizer = kinds[self.optimizer]()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * step / self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fitted(NamedTuple):
    model: Any
    trainer: Any
    rows: list[tuple[int, dict[str, float]]]
    lines: list[str]

    def final_loss(self) -> float:
        """Mean loss on data that no step had."""
        self.model.eval()
        x, y = (torch.cat(parts) for parts in zip(*(batch_of(10_000 + k) for k in range(40)), strict=True))
        with torch.no_grad():
            return float((self.model.net(x) - y).square().mean())


def fit(
    data: Any,
    *callbacks: Any,
    model: Any = None,
    steps: int = 200,
    ckpt_path: Any = None,
    folder: Path | None = None,
    **options: Any,
) -> Fitted:
    """Train; the lines of SpikeRollback come with the result."""
    model = model or Model()
    if ckpt_path is None:
        torch.manual_seed(1)  # of dropout
    options = {"log_every_n_steps": 10, "max_steps": steps, "max_epochs": -1, "default_root_dir": folder, **options}
    trainer = trainer_with(*callbacks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, data, ckpt_path=ckpt_path)
    lines = [str(warned.message) for warned in caught if "SpikeRollback" in str(warned.message)]
    return Fitted(model, trainer, trainer.logger.rows, lines)


class States(pl.Callback):
    """Keeps copies of weights, buffers and optimizer state by step."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.trainer = trainer
        if trainer.global_step not in self.at:  # the first micro-batch of a step
            self.at[trainer.global_step] = state_of(trainer)

    def after_rollback(self) -> None:
        if self.trainer.global_step in self.at:  # it comes when the step starts, after the hook above
            self.at[self.trainer.global_step] = state_of(self.trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.at[trainer.global_step] = state_of(trainer)


def state_of(trainer: Any) -> Any:
    """Copies of weights, buffers and optimizer state, of sharded ones this rank's."""
    optimizers = [[dict(entry) for entry in optimizer.state.values()] for optimizer in trainer.optimizers]
    live = [dict(trainer.lightning_module.state_dict()), optimizers]
    return tree_map(lambda value: local(value).detach().clone() if isinstance(value, Tensor) else value, live)


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def rollbacks(**options: Any) -> SpikeRollback:
    return SpikeRollback(**{**QUICK, **options})
