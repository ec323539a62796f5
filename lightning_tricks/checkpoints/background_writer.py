"""Write checkpoints in a thread while training goes on, one at a time."""

import threading
from collections.abc import Callable
from typing import Any

from lightning_tricks._trainer import is_a


class BackgroundWriter:
    """Runs one call at a time in a thread of its own; the end of the interpreter waits for it.

    An error of the call is raised once, by the next method that the caller uses.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Have the thread call `write`, when the running call has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint writer")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when no call is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of the last call, if it has ended with one; does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def wait_for_write(trainer: Any) -> None:
    """Wait until a checkpoint that is written in the background has its name; raises the error of its write."""
    for writer in (trainer.strategy, trainer.strategy.checkpoint_io):
        if hasattr(writer, "wait"):
            writer.wait()
        elif is_a(writer, "AsyncCheckpointIO"):
            writer.teardown()  # its only method that waits; the next save starts its thread again
