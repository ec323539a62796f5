"""Seconds by what they were spent on, none of them counted twice."""

import functools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning_tricks._replaced import replaced

clock = time.perf_counter


class Stopwatch:
    """Give every second to what was entered last and not yet left, or else to `ground`.

    A checkpoint written inside a validation is a checkpoint's time and not validation's.

    Args:
        ground: what goes on when nothing else does; may be changed after a `take`.
    """

    def __init__(self, ground: str) -> None:
        self.ground = ground
        self._inside: list[str] = []
        self._seconds: dict[str, float] = {}
        self._ground_seconds = 0.0
        self._since = clock()

    def enter(self, kind: str) -> None:
        """Begin `kind`."""
        self._add()
        self._inside.append(kind)

    def leave(self) -> None:
        """End what was entered last."""
        self._add()
        self._inside.pop()

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds of the ground and of every kind that has ended, since they were last taken."""
        self._add()
        ended = {kind: seconds for kind, seconds in self._seconds.items() if kind not in self._inside}
        ground, self._ground_seconds = self._ground_seconds, 0.0
        self._seconds = {kind: seconds for kind, seconds in self._seconds.items() if kind in self._inside}
        return ground, ended

    def _add(self) -> None:
        now = clock()
        passed, self._since = now - self._since, now
        if self._inside:
            self._seconds[self._inside[-1]] = self._seconds.get(self._inside[-1], 0.0) + passed
        else:
            self._ground_seconds += passed


def time_checkpoints(trainer: Any, apart: Callable[[str], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run `trainer.save_checkpoint`, which has no hook around it, inside `apart("checkpoint")`; returns the undoing."""
    save = trainer.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        with apart("checkpoint"):
            save(*args, **kwargs)

    scope = ExitStack()
    scope.enter_context(replaced(trainer, "save_checkpoint", save_checkpoint))
    return scope.close


def time_compilations(watch: Stopwatch) -> Callable[[], None]:
    """Count each of torch.compile's compilations from now on as "compile"; returns the undoing.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/callback.py. Does nothing where torch has no such
    handler.
    """
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        return lambda: None
    start = handler.register_start_callback(lambda _: watch.enter("compile"))
    end = handler.register_end_callback(lambda _: watch.leave())

    def undo() -> None:
        for known, ours in ((handler.start_callbacks, start), (handler.end_callbacks, end)):
            if ours in known:  # torch._dynamo.reset may have cleared them
                known.remove(ours)

    return undo
