"""Count FLOPs in a real micro-batch, for modules that cannot be run on a copy."""

import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch._dynamo import eval_frame

from lightning_tricks._replaced import replaced
from lightning_tricks.accounting._flop_counter import FlopCounter, names_of_parts, part_in
from lightning_tricks.accounting.measured_flops import CannotCount, in_words


class RealStep:
    """Counts the FLOPs of all that `training_step` and the backward passes do until `close`. Changes no result.

    The Trainer's strategy calls both, so its methods are replaced meanwhile. What an optimizer multiplies in its own
    step is not counted. Each rank counts what it computes itself.

    A copy is the better way where it can be run: torch takes some gradients (`prod`) in another order while operators
    are watched, and compiled code hides its operators. Here both mean that there is no figure.

    Args:
        trainer: the Trainer of the running fit.
        module: its LightningModule.
    """

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self.counter = FlopCounter(module)
        self._scope = ExitStack()
        counter, strategy = self.counter, trainer.strategy
        step = strategy.optimizer_step

        def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            with counter.counting(paused=True):
                return step(optimizer, _inside(counter.counting, closure), *args, **kwargs)

        methods = {
            "training_step": _inside(counter.counting, strategy.training_step),
            "backward": _inside(counter.counting_backward, strategy.backward),
            "optimizer_step": optimizer_step,
        }
        for name, method in methods.items():
            self._scope.enter_context(replaced(strategy, name, method))
        self._look_for_compiled_code(names_of_parts(module))

    def close(self) -> FlopCounter:
        """Give the strategy its methods back, and return the counter.

        Raises:
            CannotCount: an operator could not be counted, or compiled code ran.
        """
        self._scope.close()
        if self.counter.failed is not None:
            raise in_words(self.counter.failed)
        return self.counter

    def _look_for_compiled_code(self, names: dict[int, str]) -> None:
        """See each call of a compiled function: all of them ask torch for the stance first (2.11 to 2.13)."""
        known: Any = getattr(eval_frame, "_callback_from_stance", None)

        def callback_from_stance(callback: Any) -> Any:
            if callable(callback):
                frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
                self.counter.failed = CannotCount(f"{part_in(frames, names)} is compiled, which hides its operators")
            return known(callback)

        if known is None:
            self.counter.failed = CannotCount("this version of torch does not tell whether code is compiled")
        else:
            self._scope.enter_context(replaced(eval_frame, "_callback_from_stance", callback_from_stance))


def _inside(context: Callable[[], AbstractContextManager[None]], method: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return inside
