"""A stopwatch for a training run: seconds by phase and by kind of work, none of them counted twice."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch._dynamo.callback import callback_handler

clock = time.perf_counter


class Stopwatch:
    """Count every second to the kind of work that was entered last and not left yet, or else to the current `phase`.

    A checkpoint written inside a validation is time of the checkpoint, not of the validation. Set `phase` only right
    after a `take`; at any other time, use `switch`.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._inside: list[str] = []
        self._seconds: dict[str, float] = {}
        self._since = clock()

    def switch(self, phase: str) -> None:
        """Begin another phase; allowed inside a kind of work, too."""
        self._add()
        self.phase = phase

    def enter(self, kind: str) -> None:
        """Begin a kind of work inside the phase; its name is no phase's."""
        self._add()
        self._inside.append(kind)

    def leave(self) -> None:
        """End the kind that was entered last."""
        self._add()
        self._inside.pop()

    def read(self) -> dict[str, float]:
        """Seconds of every phase and every kind, since the start or since they were taken."""
        self._add()
        return dict(self._seconds)

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds of the current phase, and of every other phase and kind that has ended, since the last `take`."""
        self._add()
        ended = {kind: self._seconds.pop(kind) for kind in [*self._seconds] if kind not in self._inside}
        return ended.pop(self.phase, 0.0), ended

    def _add(self) -> None:
        kind, now = self._inside[-1] if self._inside else self.phase, clock()
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
