"""FLOPs of the training step of a module that we never saw, counted while the step really runs.

`flop_counter.py` counts operators; `compiled_code.py` traces code that hides them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_tricks._replaced import replaced
from lightning_tricks.accounting.flop_counting.compiled_code import compiled_calls_counted
from lightning_tricks.accounting.flop_counting.flop_counter import CannotCount, FlopCounter

__all__ = ["CannotCount", "FlopCounter", "count_flops", "counting_real_step"]


@contextmanager
def count_flops(module: nn.Module) -> Iterator[FlopCounter]:
    """Count the FLOPs of all forward and backward passes inside the `with`. Changes no result.

    The counter's `flops` are those of the model and those of activation checkpointing, which computes a second time;
    work that a fused attention kernel repeats inside itself is in neither figure. Linear layers, convolutions, grouped
    products (of experts) and attention are counted; attention counts in full, masked or not. A sharded module counts
    the work of this device.

    Compiled code, which hides its operators, is traced by `torch.compile` once more for each of its calls, and not run.

    Args:
        module: names the parts in messages.

    Raises:
        CannotCount: by `counter.flops`, where compiled code cannot be captured as one graph.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py.
    """
    counter = FlopCounter(module)
    with _all_seen(counter), counter.counting():
        yield counter


@contextmanager
def counting_real_step(trainer: Any, module: nn.Module) -> Iterator[FlopCounter]:
    """As `count_flops`, in `training_step` and in the backward passes that a Trainer runs inside the `with`.

    The Trainer's strategy calls both, so its methods are replaced meanwhile. Matrix products of the optimizer are not
    counted. Each rank counts its own work.
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
        _all_seen(counter),
    ):
        yield counter


@contextmanager
def _all_seen(counter: FlopCounter) -> Iterator[None]:
    """Tell the counter of compiled code and of backward passes."""
    run_backward: Any = getattr(torch.autograd, "_engine_run_backward", None)  # of `torch.autograd.backward`, `grad`
    if run_backward is None:
        counter.fail("this version of torch does not tell when a backward pass begins")

    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        counter.before_backward(outputs)
        return run_backward(outputs, *args, **kwargs)

    with (
        replaced(torch.autograd, "_engine_run_backward", engine_run_backward),
        compiled_calls_counted(counter),
    ):
        yield
