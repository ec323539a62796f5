"""Run Python's garbage collector at chosen steps, the same on all ranks, and at no other time.

A collection stops the process for as long as it takes to walk all objects that it tracks: a fraction of a second with
a few million of them. When each rank collects at a step of its own, all ranks wait each time for the one that does.
"""

import gc
from typing import Any

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import is_accumulating

__all__ = ["GCControl"]


class GCControl(pl.Callback):
    """Collect garbage every n steps and at no other time: takes over Python's collector. Never changes training.

    At the start of training it collects once, and takes all objects that there are then out of later collections
    (`gc.freeze`): the model, the optimizer, the data sets. It does so once more after the first step, whose compilation
    makes many objects that stay. Automatic collection is off until the end of the fit, also of one that fails; then the
    collector is as it was before. Collections are at the same step on all ranks. They are full ones, so that cyclic
    garbage cannot pile up, and take milliseconds, because they do not walk the frozen objects.

    Most objects are freed without the collector, when nothing refers to them any more. It frees cycles: objects that
    refer to each other.

    Where the program has frozen objects of its own already, none are frozen here: thawing ours would thaw those.

    Args:
        every_n_steps: optimizer steps between two collections. Until the next one, cyclic garbage keeps its memory, and
            the tensors in it keep theirs.

    Raises:
        UsageError: `every_n_steps` is below 1.

    Source: torchtitan's `GarbageCollection` and OLMo-core's `GarbageCollectorCallback`, which collect the two younger
    generations only, every 1000 steps (links in docs/speed.md).
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise UsageError(f"GCControl.every_n_steps={every_n_steps}: give 1 or more")
        self.every_n_steps = every_n_steps
        self._is_on = False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Take the collector over."""
        self._restore()
        self._is_on, self._was_enabled = True, gc.isenabled()
        self._freezes = gc.get_freeze_count() == 0
        self._steps = 0
        gc.disable()
        self._collect(freeze=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the step, and collect if it is time."""
        if not self._is_on or is_accumulating(trainer):
            return
        self._steps += 1
        if self._steps == 1 or self._steps % self.every_n_steps == 0:
            self._collect(freeze=self._steps == 1)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Give the collector back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Give the collector back."""
        self._restore()

    def _collect(self, freeze: bool) -> None:
        gc.collect()
        if freeze and self._freezes:
            gc.freeze()

    def _restore(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
