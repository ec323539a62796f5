"""FLOPs of one training step of a module that we never saw: on a copy without data, or while the real step runs."""

import inspect
import logging
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import is_a
from lightning_tricks.accounting.flop_counting.copy_without_data import copy_without_data
from lightning_tricks.accounting.flop_counting.flop_counter import CannotCount, FlopCounter, in_words

Context = Callable[[], AbstractContextManager[Any]]


def count_flops(module: Any, batch: Any, trainer: Any = None, context: Context = nullcontext) -> tuple[int, int]:
    """FLOPs of forward and backward pass of `module.training_step(batch, 0)`, as (the model's, the recomputed).

    The step is run on a copy whose tensors have shapes and no data, so it takes no memory and no device time. Module,
    batch and random states are left as they were, and `self.log` does nothing. Arrays on the host are shared read-only.

    It counts linear layers, convolutions, grouped products (of experts) and attention; attention counts in full, masked
    or not. Kernels of other packages are not counted. The second figure is the work that activation checkpointing does
    a second time; work that a fused attention kernel repeats inside itself is in neither figure.

    Args:
        module: with a `training_step`; sharded and compiled parts are counted as if one device ran them in eager.
        batch: a micro-batch, of any type that can be copied.
        trainer: the module's, or None; the step may read plain values of it only.
        context: makes a context manager in which the step runs, such as autocast.

    Raises:
        CannotCount: the step depends on values (`if loss > 0`, `x[mask]`) or needs its Trainer; the module holds
            parameters where no copy reaches them (in a closure), or more than 100,000 objects on the host.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
    """
    return count_on_copy(module, batch, trainer, context).flops


def count_on_copy(module: Any, batch: Any, trainer: Any = None, context: Context = nullcontext) -> FlopCounter:
    """As `count_flops`, but returns the counter, which also lists the operators that it could not count."""
    try:
        return _count(module, batch, trainer, context, no_metrics=False)
    except CannotCount:
        if not any(is_a(part, "Metric", "MetricCollection") for part in module.modules()):
            raise
    return _count(module, batch, trainer, context, no_metrics=True)


@contextmanager
def counting_real_step(trainer: Any, module: nn.Module) -> Iterator[FlopCounter]:
    """Count the FLOPs of `training_step` and of the backward passes inside the `with`. Changes no result.

    The Trainer's strategy calls both, so its methods are replaced meanwhile. Matrix products of the optimizer are not
    counted. Each rank counts its own work.

    Prefer `count_flops` where it works: while operators are counted, torch computes some gradients (`prod`) in another
    order, and compiled code hides its operators. After either of these, reading the counter raises CannotCount.
    """
    counter, strategy = FlopCounter(module), trainer.strategy
    step = strategy.optimizer_step

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with counter.counting(False):
            return step(optimizer, counter.counting()(closure), *args, **kwargs)

    with (
        replaced(strategy, "training_step", counter.counting()(strategy.training_step)),
        replaced(strategy, "backward", counter.counting()(strategy.backward)),
        replaced(strategy, "optimizer_step", optimizer_step),
        _compiled_code_seen(counter),
    ):
        yield counter


@contextmanager
def _compiled_code_seen(counter: FlopCounter) -> Iterator[None]:
    """Set the counter's failure when compiled code runs: it always asks torch for the stance (torch 2.11 to 2.13)."""
    original: Any = getattr(eval_frame, "_callback_from_stance", None)
    if original is None:
        counter.failure = CannotCount("this version of torch does not tell whether code is compiled")
        yield
        return

    def callback_from_stance(callback: Any) -> Any:
        if callable(callback):
            counter.failure = CannotCount(f"{counter.running_part()} is compiled, which hides its operators")
        return original(callback)

    with replaced(eval_frame, "_callback_from_stance", callback_from_stance):
        yield


def _count(module: Any, batch: Any, trainer: Any, context: Context, no_metrics: bool) -> FlopCounter:
    counter = None
    with _without_a_trace(), torch.compiler.set_stance("force_eager"):
        # With a ShapeEnv a value may be read, to be logged; asking which branch it takes is an error. Without fallback
        # kernels nothing is ever run on a device, no collective either.
        fake = FakeTensorMode(allow_fallback_kernels=False, shape_env=ShapeEnv(), static_shapes=True)
        try:
            replica, batch = copy_without_data(module, batch, trainer, fake, no_metrics)
            counter = FlopCounter(replica)
            with fake, counter, torch.enable_grad():
                _run(replica, batch, context)
        except CannotCount:
            raise
        except Exception as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            part = f"{counter.part_in(reversed(frames))}: " if counter else ""
            raise CannotCount(part + in_words(error)) from error
    return counter


def _run(replica: Any, batch: Any, context: Context) -> None:
    parameters = inspect.signature(replica.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CannotCount("training_step takes the iterator, not a batch")
    with context():
        output = replica.training_step(batch, 0) if len(parameters) > 1 else replica.training_step(batch)
    loss = output.get("loss") if isinstance(output, dict) else output
    if getattr(replica, "automatic_optimization", True):
        if loss is None or not loss.requires_grad:
            raise CannotCount("training_step returned no loss to go backward from")
        replica.backward(loss) if hasattr(replica, "backward") else loss.backward()


@contextmanager
def _without_a_trace() -> Iterator[None]:
    """Put all random states back, as a step may draw; silence warnings and logs, which the real step repeats."""
    states, level = (random.getstate(), np.random.get_state()), logging.root.manager.disable
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
