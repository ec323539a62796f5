"""How long a CUDA device waits for data, without waiting for the device."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class DeviceWait:
    """Seconds that the device was idle while the host waited for batches.

    Two events enclose each wait in the device's queue. The device passes the first when it has done what was queued
    before, and the second when it has that and the host has the batch: between them it had nothing to do. A wait that
    the device does not notice, because it still has work, counts nothing.

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
        """Seconds of all waits that the device has passed since the last `take`."""
        self._collect()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _recorded(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def _collect(self) -> None:
        """Add up what the device has passed, so that few events are kept; asks, and does not wait."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1000  # milliseconds


def device_wait_on(device: torch.device) -> DeviceWait | None:
    """One for a CUDA device; None for others, where the wait of the host has to do."""
    return DeviceWait() if device.type == "cuda" else None
