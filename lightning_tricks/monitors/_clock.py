"""The clock of a training run, for the monitors of speed and of goodput.

A stopwatch counts the host's seconds. A monitor reads it when the buffer has brought an interval's values, behind a
`fence`, which waits for the device; nothing else waits. Saves, waits for data and compilations are counted apart.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.callback import callback_handler

from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.loop import fetch_hooks
from lightning_tricks._trainer.saves import around_saves

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

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """A context that is time of `kind`."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

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


def fence(device: torch.device) -> Tensor | float:
    """A value to record behind each step: a device copies it in the order of its stream, when the step is done."""
    return 0.0 if device.type == "cpu" else torch.zeros((), device=device)


@contextmanager
def saves_timed(
    trainer: Any, watch: Stopwatch, before: Callable[[Any], None], after: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Count the time that training waits for a checkpoint as "checkpoint", also for one written in the background.

    Args:
        before: called with the checkpoint's path before the time of a save begins.
        after: called when it has ended, also with an error.
    """

    @contextmanager
    def save() -> Iterator[None]:
        try:
            with watch.timing("checkpoint"):
                yield
        finally:
            after()

    with ExitStack() as scope:
        scope.enter_context(around_saves(trainer, before_save=before, during_save=save))
        for writer in (trainer.strategy, trainer.strategy.checkpoint_io):
            if hasattr(writer, "wait"):
                scope.enter_context(replaced(writer, "wait", watch.timing("checkpoint")(writer.wait)))
        yield


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


@contextmanager
def fetches_timed(trainer: Any, watch: Stopwatch, device_wait: "DeviceWait | None") -> Iterator[None]:
    """Count the waits for a batch between two steps as "data", or let `device_wait` count those of the device.

    Only waits in the phase "steps" are counted so; in another phase they are time of that phase. A wait ends the phase
    "validation".
    """
    owner, before, after = fetch_hooks(trainer)
    original_begin, original_end = getattr(owner, before), getattr(owner, after)
    counts = False

    def begin() -> None:
        nonlocal counts
        if watch.phase == "validation":
            watch.switch("steps")
        counts = watch.phase == "steps"
        if counts:
            device_wait.begin() if device_wait else watch.enter("data")
        original_begin()

    def end() -> None:
        original_end()
        if counts:
            device_wait.end() if device_wait else watch.leave()

    with replaced(owner, before, begin), replaced(owner, after, end):
        yield


class DeviceWait:
    """Seconds that a CUDA device was idle while the host waited for batches, measured without waiting for the device.

    The host queues one event before each wait and one after it. The device reaches the first event when it has done all
    work queued before, and the second when, in addition, the host has the batch: in between it had nothing to do. If
    the device still has work during the whole wait, the two events follow each other at once, and nothing is counted.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.streams.Event.html.
    """

    def __init__(self, new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        self._new_event = new_event
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        """The host begins to wait."""
        self._first = self._recorded()

    def end(self) -> None:
        """The host has the batch."""
        self._pending.append((self._first, self._recorded()))
        self._collect()

    def take(self) -> float:
        """Seconds of all waits whose second event the device has reached since the last `take`."""
        self._collect()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def _collect(self) -> None:
        """Add up the waits that are over, so that few events are kept. It queries the events, without a wait."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1000  # milliseconds


def device_wait_on(device: torch.device) -> DeviceWait | None:
    """A DeviceWait for a CUDA device; None for other devices, where the time that the host waits is taken."""
    return DeviceWait() if device.type == "cuda" else None
