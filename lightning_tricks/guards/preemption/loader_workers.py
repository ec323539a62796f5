"""A DataLoader's workers outlive the signals that ask their run to stop: without them the step could not be finished.

A terminal, torchrun and SLURM signal every process of a run. A worker that dies of it takes the run along: torch raises
"DataLoader worker is killed by signal" anywhere in the main process, and no batch comes any more.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data._utils import worker

from lightning_tricks._core.replaced import replaced

_torch_loop = worker._worker_loop
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"


@contextmanager
def shielded_workers() -> Iterator[None]:
    """Shield the workers that start inside the `with`, forked or spawned, of torch's loader and of torchdata's.

    They end when their loader ends them, or when the main process is gone. On systems without `sigwaitinfo`, such as
    macOS, they are not shielded.
    """
    with ExitStack() as replacements:
        if hasattr(signal, "sigwaitinfo"):
            replacements.enter_context(replaced(worker, "_worker_loop", worker_loop))
            if (stateful := sys.modules.get(_STATEFUL)) is not None:
                replacements.enter_context(replaced(stateful, "_worker_loop", stateful_worker_loop))
        yield


def worker_loop(*args: Any) -> None:
    """What a shielded worker runs. A function of a module, so that a spawned process finds it."""
    _shield()
    _torch_loop(*args)


def stateful_worker_loop(*args: Any) -> None:
    """The same for torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader.worker import _worker_loop

    _shield()
    _worker_loop(*args)


def _shield() -> None:
    """Block the signals in this process, and end it when its parent sends SIGTERM, as a loader does in the end."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the threads that start later, too

    def obey_parent() -> None:
        while True:
            info = signal.sigwaitinfo(signals)
            if info.si_signo == signal.SIGTERM and info.si_pid == parent:
                os._exit(0)  # torch's own handler for it does the same

    threading.Thread(target=obey_parent, daemon=True, name="obey-parent").start()
