"""Short runs with a RunLedger, and the faults that are planted in them."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import runs
from harness.models import Small, rows
from torch import nn

from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.run_facts import data_rank
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
        self.table = rows(STEPS * ROWS, 8, seed=5)
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


def net(dropout: float) -> Small:
    """Two layers with dropout, and a weight without a gradient, of which nothing but its bits can tell a fault."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    module = Small(8, 8, 3, dropout=dropout, optimizer=adamw, loss=lambda own, batch: own(batch["x"]).square().mean())
    module.unused = nn.Parameter(torch.randn(5), requires_grad=False)
    return module


class Plant(pl.Callback):
    """At one step, flip a bit of a weight or set another seed, at a place that a seed draws.

    Args:
        step: 0 for the first.
        what: `bit` or `seed`.
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
        if self.what == "seed":
            torch.manual_seed(self.draw.randrange(2**32))
        else:
            flip_a_bit(self.draw.choice(list(pl_module.parameters())), self.draw)


def flip_a_bit(weight: torch.Tensor, draw: random.Random) -> None:
    """Flip one of a float32 tensor's bits, any but those of the sign and the exponent."""
    bits = weight.detach().view(torch.int32).view(-1)
    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(23)


def fit(folder: Path, *plants: pl.Callback, data: Rows | None = None, ledger: Any = None, **options: Any) -> None:
    """Train, with the ledger of all weights in `folder`. The checkpoint of step 3 is kept."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    checkpoint, dropout = options.pop("ckpt_path", None), options.pop("dropout", 0.2)
    module = options.pop("module", net)(dropout)
    saver = options.pop("saver", None) or SafeCheckpoint(folder / "saved", every_n_train_steps=SAVED, keep_last=9)
    options = {"max_steps": STEPS, "logger": False, "use_distributed_sampler": False} | options
    ledger = ledger or RunLedger(str(folder / "ledger.jsonl"), 1)
    runs.fit(module, *plants, ledger, saver, data=data or Rows(), ckpt_path=checkpoint, **options)


def failing(step: int) -> pl.Callback:
    """Raises before the batch of a step."""

    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == step:
            raise RuntimeError("power cut")

    return runs.On(on_train_batch_start=fail)
