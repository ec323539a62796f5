"""Callbacks that make one rank of a run fail, for the tests of how a run ends. They work from a recipe."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning_tricks._lightning import pl


class Fail(pl.Callback):
    """Make one rank fail before a batch, in mid-run.

    Args:
        rank: which one.
        step: optimizer steps done before it fails.
        how: `kill` (SIGKILL) or `raise` (ValueError).
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
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.others == "sleep":
            time.sleep(1000)
        elif self.others == "stuck":
            mutex, pthreads = ctypes.create_string_buffer(128), ctypes.CDLL(None)
            pthreads.pthread_mutex_lock(mutex)
            pthreads.pthread_mutex_lock(mutex)
