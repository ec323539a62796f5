"""Fit a module under a quiet Trainer, give back what was logged, the weights and the random state; and callbacks."""

import contextlib
import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.models import Decoding, Small
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.accounting.flop_counting import counting_real_step


class Memory(pl.loggers.Logger):
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
    """What a fit left."""

    rows: list[tuple[int, dict[str, float]]]
    weights: list[Tensor]
    random_state: Tensor
    trainer: pl.Trainer
    model: Any

    def of(self, name: str) -> list[float]:
        """The values of a metric."""
        return [values[name] for _, values in self.rows if name in values]

    def at(self, name: str) -> dict[int, float]:
        """The values of a metric by the logger's step."""
        return {step: values[name] for step, values in self.rows if name in values}

    def names(self) -> set[str]:
        return {name for _, values in self.rows for name in values}


def trainer_with(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A Trainer for 4 steps on one CPU that prints nothing and saves nothing, unless a callback does."""
    has = lambda kind: any(isinstance(callback, kind) for callback in callbacks)  # noqa: E731
    defaults = {
        "max_steps": 4, "log_every_n_steps": 2, "accelerator": "cpu", "devices": 1, "logger": Memory(),
        "enable_checkpointing": has(pl.callbacks.Checkpoint), "enable_model_summary": has(pl.callbacks.ModelSummary),
        "enable_progress_bar": has(pl.callbacks.ProgressBar),
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(
    model: Any = None, *callbacks: pl.Callback, data: Any = None, val: Any = None, ckpt_path: Any = None, **options: Any
) -> Run:
    """Train a module, `Small()` by default, under `trainer_with(*callbacks, **options)`.

    Args:
        data: for training: batches, or a data module.
        val: for validation.
    """
    model, trainer = Small() if model is None else model, trainer_with(*callbacks, **options)
    trainer.fit(model, data, val, ckpt_path=ckpt_path)
    logged = trainer.logger.rows if isinstance(trainer.logger, Memory) else []
    return Run(logged, weights_of(model), torch.get_rng_state(), trainer, model)


def decoding(*callbacks: pl.Callback, **options: Any) -> Run:
    """Fit `Decoding`; its options are `config`, `checkpointing`, `compiled` and `backend`, others the Trainer's."""
    own = {name: options.pop(name) for name in ("config", "checkpointing", "compiled", "backend") if name in options}
    return fit(Decoding(**own), *callbacks, **options)


def weights_of(module: torch.nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, gathered if it is a shard; then every rank must call."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether tensors are the same ones to the bit, also in number and type."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def same_training(one: Run, other: Run) -> bool:
    """Whether two runs ended with the same weights and the same random state, to the bit."""
    return same(one.weights, other.weights) and torch.equal(one.random_state, other.random_state)


class Clock:
    """Stands still unless somebody lets time pass, in place of a clock that is called."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def warned(of: str) -> Iterator[list[str]]:
    """The warnings inside the `with` in which `of` stands: a list that is filled when it ends."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    lines += [line for each in caught if of in (line := str(each.message))]


class On(pl.Callback):
    """Functions as hooks: `On(on_train_batch_end=lambda trainer, *_: ...)`; each has the hook's own arguments."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        unknown = [name for name in hooks if not hasattr(pl.Callback, name)]
        assert not unknown, f"no hooks: {unknown}"
        vars(self).update(hooks)


class Fail(pl.Callback):
    """Make one rank fail before a batch, in mid-run; it works from a recipe.

    Args:
        rank: which one.
        step: optimizer steps done before it fails.
        how: `kill` (SIGKILL), `raise` (ValueError), or `hang`: it waits for ever before the last block of a decoder.
        others: what the other ranks do then: `train`, `sleep` in Python, or be `stuck` in a call into C that no signal
            interrupts, as one is in a collective that never returns.
    """

    def __init__(self, rank: int, step: int = 3, how: str = "kill", others: str = "train") -> None:
        self.rank, self.step, self.how, self.others = rank, step, how, others

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        if trainer.global_rank == self.rank:
            Path("failed_at").write_text(str(time.time()))
            if self.how == "raise":
                raise ValueError("bad batch")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            pl_module.decoder.blocks[-1].register_forward_pre_hook(lambda *_: threading.Event().wait())
        elif self.others == "sleep":
            time.sleep(1000)
        elif self.others == "stuck":
            mutex, pthreads = ctypes.create_string_buffer(128), ctypes.CDLL(None)
            pthreads.pthread_mutex_lock(mutex)
            pthreads.pthread_mutex_lock(mutex)


class CountsFlops(pl.Callback):
    """The FLOPs of the last micro-batch, in `found`."""

    found: tuple[int, int]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.scope = contextlib.ExitStack()
        self.counter = self.scope.enter_context(counting_real_step(trainer, pl_module))

    def on_train_batch_end(self, *_: Any) -> None:
        self.scope.close()
        self.found = self.counter.flops
