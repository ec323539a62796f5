"""FLOPs of one micro-batch of a module that we never saw: its `training_step` is run on a copy without weights."""

import contextlib
import inspect
import logging
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class CannotCount(Exception):  # noqa: N818  no error of the user's: there are other ways to the figure
    """The module's FLOPs cannot be counted; the message names the part of the module and says why in a few words."""


def count_flops(
    module: Any, batch: Any, trainer: Any = None, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[int, int]:
    """FLOPs of forward and backward pass of `module.training_step(batch, 0)`, as (the model's, those spent again).

    The step is run on a copy whose tensors have shapes and no data, so it takes no memory and no device time. Module,
    batch and random states are left as they were, and `self.log` does nothing. Arrays on the host are shared with the
    copy, which cannot write to them.

    Counted are linear layers, convolutions, grouped products (of experts) and attention, masked or not, the latter in
    full. Kernels of other packages count nothing. The second figure is the work that activation checkpointing does a
    second time; the work that a fused attention kernel does again inside itself is in neither.

    Args:
        module: with a `training_step`, such as a LightningModule; sharded, compiled and wrapped parts are counted as
            one device would run them all.
        batch: a micro-batch, of any type that can be copied.
        trainer: what the module asks its Trainer for; it may read plain values only.
        context: makes what the step runs under, such as autocast.

    Raises:
        CannotCount: the step depends on values (`if loss > 0`, `x[mask]`), needs its Trainer, holds parameters where
            no copy reaches them (in a closure), or more than 100,000 objects on the host.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
    """
    counter = counter_of_copy(module, batch, trainer, context)
    return counter.model, counter.recompute


def counter_of_copy(
    module: Any, batch: Any, trainer: Any = None, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Any:
    """As `count_flops`, but returns the `FlopCounter`, which knows also the operators that it could not count."""
    from lightning_tricks.accounting._copy_without_data import metric_classes

    has_metrics = any(isinstance(part, metric_classes()) for part in module.modules())
    try:
        return _count(module, batch, trainer, context(), without_metrics=False)
    except Exception as error:
        if not has_metrics:
            raise in_words(error) from error
    try:
        return _count(module, batch, trainer, context(), without_metrics=True)
    except Exception as error:
        raise in_words(error) from error


def _count(module: Any, batch: Any, trainer: Any, context: AbstractContextManager[Any], without_metrics: bool) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from lightning_tricks.accounting._copy_without_data import copy_without_data
    from lightning_tricks.accounting._flop_counter import FlopCounter, names_of_parts

    with _silence(), _random_states_kept(), torch.compiler.set_stance("force_eager"):
        # With a ShapeEnv a value may be read, to be logged; asking which branch it takes is an error. Without fallback
        # kernels nothing is ever run on a device, no collective either.
        fake = FakeTensorMode(allow_fallback_kernels=False, shape_env=ShapeEnv(), static_shapes=True)
        replica, batch = copy_without_data(module, batch, trainer, fake, without_metrics)
        counter = FlopCounter(replica)
        try:
            with fake, counter, torch.enable_grad():
                _run(replica, batch, context)
        except Exception as error:
            error.part = _part_that_failed(error, names_of_parts(replica))  # type: ignore[attr-defined]
            raise
    if counter.failed is not None:
        raise counter.failed
    return counter


def _run(replica: Any, batch: Any, context: AbstractContextManager[Any]) -> None:
    parameters = inspect.signature(replica.training_step).parameters
    if "dataloader_iter" in parameters:
        raise CannotCount("training_step takes the iterator, not a batch")
    with context:
        output = replica.training_step(batch, 0) if len(parameters) > 1 else replica.training_step(batch)
    loss = output.get("loss") if isinstance(output, dict) else output
    if getattr(replica, "automatic_optimization", True):
        if loss is None or not loss.requires_grad:
            raise CannotCount("training_step returned no loss to go backward from")
        replica.backward(loss) if hasattr(replica, "backward") else loss.backward()


def _part_that_failed(error: BaseException, names: dict[int, str]) -> str | None:
    from lightning_tricks.accounting._flop_counter import part_in

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return part_in(reversed(frames), names)


# Parts of the names that torch gives its errors, and what the module did.
_IN_WORDS = {
    "DataDependent": "its work depends on the values of a tensor",
    "DynamicOutputShape": "its shapes depend on the values of a tensor",
    "Please convert all Tensors to FakeTensors": "it uses tensors that are no parameters or buffers of the module",
}


def in_words(error: Exception) -> CannotCount:
    """One line: the part of the module, and what it does that a copy without data cannot do."""
    if isinstance(error, CannotCount):
        return error
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    said = next((words for name, words in _IN_WORDS.items() if name in text), text.partition("\n")[0])
    part = getattr(error, "part", None)
    return CannotCount(f"{part}: {said}" if part else said)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No warnings and no log lines: the real step will say it, and torch logs what fails on a copy without data."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put Python's, numpy's and torch's random states back: a step may draw on the host."""
    import torch

    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
