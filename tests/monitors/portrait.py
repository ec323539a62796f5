"""Everything that a callback could change, as plain data: objects, the process, and reads that wait for a device."""

import collections
import contextlib
import enum
import functools
import gc
import logging
import os
import pathlib
import random
import signal
import sys
import threading
from collections.abc import Container, Mapping
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from harness.device_reads import watching_reads
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.utils.data import DataLoader

from lightning_tricks._trainer.loop import logging_step
from lightning_tricks.metrics.metric_buffer import MetricBuffer

# ------------------------------------------------------------------------------------------------------------- objects

PLAIN = (type(None), bool, int, str, float, complex, bytes, enum.Enum, torch.dtype, torch.device, pathlib.Path)
# Only attributes of these are looked at: of Lightning's and the tests' classes, and of a few of torch's.
PACKAGES = ("lightning", "battery", "harness", "test_battery")
CLASSES = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader, torch.amp.GradScaler)
# Not looked at: a time, a case's own folder, an `id()`; the test logger's rows, of which the user's are noted apart.
CHANGING = {"_last_val_time", "_default_root_dir", "_torchdynamo_wrapper_id", "rows"}
METRICS = {"_callback_metrics", "_logged_metrics"}  # where the monitors' values stand beside the user's
USERS_METRICS = {"train/loss", "val/loss", "val/bits_per_byte", "epoch", "hp_metric"}


def portrait(roots: Mapping[str, Any], leave_out: list[Any]) -> dict[str, Any]:
    """One entry for each attribute of all that `roots` hold: tensors to the bit, functions by name, others by class."""
    found: dict[str, Any] = {}
    waiting = collections.deque(roots.items())
    seen = {id(each): each for each in leave_out}
    while waiting:
        path, value = waiting.popleft()
        if _is_a(PLAIN, type(value)):
            found[path] = repr(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            found[path], parts = _look(value, leave_out)
            waiting += [(f"{path}.{name}", part) for name, part in parts.items()]
    return found


@functools.cache
def _is_a(classes: Any, kind: type) -> bool:
    """`issubclass`, which takes long for the abstract ones, asked once of each class."""
    return issubclass(kind, classes)


def _look(value: Any, leave_out: list[Any]) -> tuple[Any, Mapping[str, Any]]:
    """An object in one line, and its parts."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        return (kind, value.requires_grad, bits(value)), {**vars(value), **_of_leaf(value)}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}", {}
    if callable(value) and hasattr(value, "__qualname__"):
        name = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
        return name, {"wrapped": getattr(value, "__wrapped__", None)}
    if isinstance(value, functools.partial):
        return kind, {"func": value.func, "args": value.args, "keywords": value.keywords}
    if _is_a(Mapping, type(value)):
        items = enumerate(value.items())
        return (kind, len(value)), {repr(k) if _is_a(PLAIN, type(k)) else f"key {i}": part for i, (k, part) in items}
    if isinstance(value, (list, tuple, collections.deque)):
        left_out = set(map(id, leave_out))
        parts = [part for part in value if id(part) not in left_out]
        return (kind, len(parts)), {str(index): part for index, part in enumerate(parts)}
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, value)) if all(isinstance(part, PLAIN) for part in value) else len(value)), {}
    followed = type(value).__module__.partition(".")[0] in PACKAGES or _is_a(CLASSES, type(value))
    if not followed or isinstance(value, MetricBuffer) or not hasattr(value, "__dict__"):
        return kind, {}
    return (kind, len(vars(value))), {n: _users(n, part) for n, part in vars(value).items() if n not in CHANGING}


def _of_leaf(tensor: Tensor) -> dict[str, Any]:
    if not tensor.is_leaf:
        return {}
    return {"grad": tensor.grad, "hooks": tensor._backward_hooks, "later": tensor._post_accumulate_grad_hooks}


def _users(name: str, part: Any) -> Any:
    return {metric: value for metric, value in part.items() if is_users(metric)} if name in METRICS else part


def is_users(metric: str) -> bool:
    """Whether the battery's modules log a metric of this name themselves."""
    return metric.partition("/dataloader_idx")[0] in USERS_METRICS


def bits(tensor: Tensor) -> Any:
    """Shape, dtype and bytes of a tensor."""
    data = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    data = torch.view_as_real(data) if data.is_complex() else data
    return tuple(tensor.shape), str(tensor.dtype), data.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------------------------- process

PATCHABLE_MODULES = (
    "torch",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.autograd",
    "torch._dynamo.eval_frame",
)
PATCHABLE_CLASSES = (
    pl.Trainer, pl.LightningModule, Strategy, SingleDeviceStrategy, DDPStrategy, Precision, MixedPrecision, nn.Module,
    nn.Linear, Tensor, torch.optim.Optimizer, torch.optim.AdamW, Logger, TensorBoardLogger,
)  # fmt: skip
torch.compile(nn.Identity())  # done here, as torch replaces a method of its optimizers with the first in a process


def process(others: Container[threading.Thread]) -> dict[str, Any]:
    """The parts of the process: random states, settings, hooks, threads, and the attributes of classes and of torch.

    Args:
        others: threads of earlier tests, which may end at any time.
    """
    modules = {name: vars(sys.modules[name]) for name in PATCHABLE_MODULES}
    hooks = vars(nn.modules.module).items()
    return {
        "python's random state": random.getstate(),
        "numpy's random state": np.random.get_state()[1].tobytes(),
        "torch's random state": bits(torch.get_rng_state()),
        "settings of torch": (
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.get_num_threads(),
        ),
        "modes of torch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks of all modules": {name: len(value) for name, value in hooks if name.startswith("_global_") and value},
        "compiler's callbacks": (list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)),
        "except hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "environment": dict(os.environ),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "logging": (logging.root.level, logging.root.manager.disable),
        "threads": threads(others),
        **{f"attributes of {cls.__qualname__}": attributes(cls) for cls in PATCHABLE_CLASSES},
        **{f"functions of {name}": {n: f for n, f in known.items() if callable(f)} for name, known in modules.items()},
    }  # fmt: skip


def attributes(cls: type) -> dict[str, Any]:
    """Those of a class, without the empty annotations that Python 3.12 adds at `isinstance` with a protocol."""
    return {name: value for name, value in vars(cls).items() if value or name != "__annotations__"}


def threads(others: Container[threading.Thread]) -> list[str]:
    """The names of the running threads but for `others`, without their numbers."""
    return sorted(thread.name.rstrip("0123456789-") for thread in threading.enumerate() if thread not in others)


# --------------------------------------------------------------------------------------------------- reads of a device


class Reads:
    """Counts what would wait for a device, from the start of the step after a log step to the next log step.

    Attributes:
        callbacks: the first and the last that the Trainer is to call.
        found: how often, by what and where.
        others: threads that ran before the first fit.
        threads: the names of those that run in the middle of the fit, but for the others.
    """

    def __init__(self, log_every: int) -> None:
        self.found: collections.Counter[str] = collections.Counter()
        self.others = frozenset(threading.enumerate())
        self.threads: list[str] = []
        self.callbacks = _First(self, log_every), _Last(self, log_every)
        self._watching = contextlib.ExitStack()

    def start(self) -> None:
        self.stop()
        self.threads = threads(self.others)
        self._watching.enter_context(watching_reads(self._note))

    def stop(self) -> None:
        self._watching.close()

    def _note(self, call: str, frame: FrameType) -> None:
        self.found[f"{call} in {pathlib.Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"] += 1


class _First(pl.Callback):
    """Stops counting in front of all that other callbacks do in a log step."""

    def __init__(self, reads: Reads, log_every: int) -> None:
        self._reads, self._log_every = reads, log_every

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (logging_step(trainer) + 1) % self._log_every == 0:
            self._reads.stop()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._reads.stop()

    def on_validation_start(self, *_: Any) -> None:
        self._reads.stop()

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        _refresh_metrics(trainer)

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self._reads.stop()
        _refresh_metrics(trainer)


class _Last(pl.Callback):
    """Starts counting when all other callbacks have begun the first batch after a log step."""

    def __init__(self, reads: Reads, log_every: int) -> None:
        self._reads, self._log_every = reads, log_every

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        step = logging_step(trainer)
        if step and step % self._log_every == 0:
            self._reads.start()


def _refresh_metrics(trainer: Any) -> None:
    """Read Lightning's metrics, which brings its record of them up to date: a monitor may read them or not."""
    _ = trainer.callback_metrics, trainer.logged_metrics
