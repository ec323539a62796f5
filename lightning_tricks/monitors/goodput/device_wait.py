"""How long a CUDA device waits for data, without waiting for the device."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class DeviceWait:
    """Seconds that the device was idle while the host waited for batches.

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
