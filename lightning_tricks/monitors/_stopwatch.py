"""Seconds by the kind of work that they were spent on, none of them counted twice."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch._dynamo.callback import callback_handler

clock = time.perf_counter


class Stopwatch:
    """Give every second to the kind of work that was entered last and not left yet, or else to `ground`.

    A checkpoint written inside a validation is a checkpoint's time and not validation's. Set `ground` only right
    after a `take`; at any other time, `switch` it.
    """

    def __init__(self, ground: str) -> None:
        self.ground = ground
        self._inside: list[str] = []
        self._seconds: dict[str, float] = {}
        self._since = clock()

    def switch(self, ground: str) -> None:
        """Go on with another ground, also in the midst of a kind that was entered."""
        self._add()
        self.ground = ground

    def enter(self, kind: str) -> None:
        """Begin `kind`, which is no ground."""
        self._add()
        self._inside.append(kind)

    def leave(self) -> None:
        """End the kind that was entered last."""
        self._add()
        self._inside.pop()

    def read(self) -> dict[str, float]:
        """Seconds of every ground and every kind, since the start or since they were taken."""
        self._add()
        return dict(self._seconds)

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds of the ground and of every kind that has ended, since the last `take`."""
        self._add()
        ended = {kind: self._seconds.pop(kind) for kind in [*self._seconds] if kind not in self._inside}
        return ended.pop(self.ground, 0.0), ended

    def _add(self) -> None:
        kind, now = self._inside[-1] if self._inside else self.ground, clock()
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._since
        self._since = now


@contextmanager
def compilations_timed(watch: Stopwatch) -> Iterator[None]:
    """Count each of torch.compile's compilations inside the `with` as "compile".

    Source: https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/callback.py.
    """
    start = callback_handler.register_start_callback(lambda _: watch.enter("compile"))
    end = callback_handler.register_end_callback(lambda _: watch.leave())
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset may have removed them
            callback_handler.remove_start_callback(start)
        with suppress(ValueError):
            callback_handler.remove_end_callback(end)
