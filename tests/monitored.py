"""Fit a small model under a Trainer and give back what was logged, the final weights and the random state."""

import contextlib
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks.accounting.flop_counting import counting_real_step
from lightning_tricks.models import GPT2, Decoder, Llama

SHAPE = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}
LLAMA = Llama(**SHAPE, n_kv_heads=2)
GPT = GPT2(**SHAPE)


class Memory(Logger):
    """A logger that keeps what it is given."""

    name = version = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


class Run(NamedTuple):
    rows: list[tuple[int, dict[str, float]]]
    weights: list[Tensor]
    random_state: Tensor
    trainer: pl.Trainer

    def of(self, name: str) -> list[float]:
        return [values[name] for _, values in self.rows if name in values]

    def names(self) -> set[str]:
        return {name for _, values in self.rows for name in values}


def fit(model: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, **options: Any) -> Run:
    memory = Memory()
    defaults = {"max_steps": 4, "log_every_n_steps": 2, "accelerator": "cpu", "devices": 1, "logger": memory}
    trainer = pl.Trainer(
        callbacks=list(callbacks), enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{**defaults, **options},
    )  # fmt: skip
    trainer.fit(model, data)
    return Run(memory.rows, [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), trainer)


def same_training(one: Run, other: Run) -> bool:
    """Whether two runs ended with the same weights and the same random state, to the bit."""
    same = all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))
    return same and torch.equal(one.random_state, other.random_state)


class Decoding(pl.LightningModule):
    """A decoder in a module that is not the collection's own; dropout, so that a drawn random number would show.

    The backend "eager" is enough for what depends on the graphs alone; "aot_eager" traces the backward pass as well.
    """

    def __init__(
        self, config: Any = LLAMA, checkpointing: Any = "none", compiled: str = "no", seed: int = 0,
        backend: str = "aot_eager",
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(seed)
        self.model = Decoder(config)
        self.dropout = nn.Dropout(0.1)
        self.model.set_activation_checkpointing(checkpointing)
        for index, block in enumerate(self.model.blocks):
            if compiled == "in_place":
                block.compile(backend=backend)
            elif compiled == "wrapped":
                self.model.blocks[index] = torch.compile(block, backend=backend)
        if compiled == "whole":
            self.model = torch.compile(self.model, backend=backend)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.dropout(self.model(batch)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        ids = torch.arange(2 * 16 * 16).view(-1, 2, 16) % 61
        return DataLoader(list(ids), batch_size=None)


class CountsFlops(pl.Callback):
    """The FLOPs of the last micro-batch, in `found`."""

    found: tuple[int, int]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.scope = contextlib.ExitStack()
        self.counter = self.scope.enter_context(counting_real_step(trainer, pl_module))

    def on_train_batch_end(self, *_: Any) -> None:
        self.scope.close()
        self.found = self.counter.flops


def decoding(*callbacks: pl.Callback, **options: Any) -> Run:
    """Fit `Decoding`; its options are `config`, `checkpointing`, `compiled` and `backend`, others the Trainer's."""
    own = {name: options.pop(name) for name in ("config", "checkpointing", "compiled", "backend") if name in options}
    return fit(Decoding(**own), *callbacks, **options)
