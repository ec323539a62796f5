"""A callback under which each wait for the device is an error, in the batches of training that a test names."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_tricks._trainer.lightning import pl


class Silence(pl.Callback):
    """Raises at any wait from the start of a batch to the start of the next: in data, training and Lightning's loop.

    Args:
        quiet: (the Trainer, number of the batch) -> whether no wait is allowed there.
    """

    def __init__(self, quiet: Callable[[Any, int], bool]) -> None:
        self.quiet, self.batches = quiet, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        quiet = self.quiet(trainer, batch_idx)
        self.batches += quiet
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
