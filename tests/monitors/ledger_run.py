"""Short runs with a RunLedger, and the faults that are planted in them."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_tricks._lightning import pl
from lightning_tricks._trainer import data_rank
from lightning_tricks.callbacks import RunLedger, SafeCheckpoint

STEPS, ROWS, SAVED = 6, 4, 3  # optimizer steps, rows of a global batch, the step of the checkpoint


class Rows(pl.LightningDataModule):
    """Rows addressed by position: the same global batches for any number of processes and micro-batches.

    Args:
        micro_batch_size: rows in a micro-batch of a process.
        swap: (step, row, row): two rows of that step's global batch change places.
    """

    def __init__(self, micro_batch_size: int = ROWS, swap: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        self.size = micro_batch_size
        self.table = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(5))
        if swap:
            step, one, other = swap
            places = [step * ROWS + one, step * ROWS + other]
            self.table[places] = self.table[places[::-1]]

    def step_samples(self) -> list[tuple[int, int]]:
        first = self.trainer.global_step * ROWS
        return [(first, first + ROWS - 1)]

    def train_dataloader(self) -> "Rows":
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world = data_rank(self.trainer)
        for start in range(self.trainer.global_step * ROWS + rank * self.size, len(self.table), world * self.size):
            yield {"x": self.table[start : start + self.size], "name": "rows"}


class Net(pl.LightningModule):
    """Two layers with dropout, and a weight without a gradient, of which nothing but its bits can tell a fault."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = dropout
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.randn(5), requires_grad=False)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(batch["x"]).tanh(), self.dropout)
        return self.second(hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


class Plant(pl.Callback):
    """At one step, flip a bit of a weight or set another seed, at a place that a seed draws.

    Args:
        step: 0 for the first.
        what: `bit`, `seed`, or `kill`: SIGKILL in the middle of the step.
        seed: draws weight, element and bit, and whether that is before the forward pass or after the optimizer's step.
        rank: the process in which it happens.
    """

    def __init__(self, step: int, what: str, seed: int = 0, rank: int = 0) -> None:
        self.step, self.what, self.rank, self.draw = step, what, rank, random.Random(seed)
        self.at_end = what == "bit" and self.draw.random() < 0.5

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.at_end and trainer.global_step == self.step:
            self._act(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at_end and trainer.global_step == self.step + 1:
            self._act(trainer, pl_module)

    def _act(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "seed":
            torch.manual_seed(self.draw.randrange(2**32))
        else:
            flip_a_bit(self.draw.choice(list(pl_module.parameters())), self.draw)


def flip_a_bit(weight: torch.Tensor, draw: random.Random) -> None:
    """Flip one of a float32 tensor's bits, any but those of the sign and the exponent."""
    bits = weight.detach().view(torch.int32).view(-1)
    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(23)


def fit(folder: Path, *plants: pl.Callback, data: Rows | None = None, ledger: Any = None, **options: Any) -> Any:
    """Train, with the ledger of all weights in `folder`; the Trainer. The checkpoint of step 3 is kept."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    checkpoint, dropout = options.pop("ckpt_path", None), options.pop("dropout", 0.2)
    module = options.pop("module", Net)(dropout)
    saver = SafeCheckpoint(folder / "saved", every_n_train_steps=SAVED, keep_last=9)
    defaults = {"max_steps": STEPS, "log_every_n_steps": 2, "accelerator": "cpu", "devices": 1, "logger": False}
    trainer = pl.Trainer(
        callbacks=[*plants, ledger or RunLedger(str(folder / "ledger.jsonl"), 1), saver], enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **{**defaults, **options},
    )  # fmt: skip
    trainer.fit(module, datamodule=data or Rows(), ckpt_path=checkpoint)
    return trainer
