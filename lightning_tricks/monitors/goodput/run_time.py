"""The wall time of a run by part: of this process, and of the processes before it."""

import math
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_tricks.accounting.goodput import PARTS, Interval, lost_to_restart
from lightning_tricks.monitors._stopwatch import Stopwatch
from lightning_tricks.monitors.goodput import process_start


class RunTime:
    """Counts every second since the start of the run to one of `PARTS`.

    Args:
        started_at: time of day from which this process counts. The time since then is set-up.
    """

    def __init__(self, started_at: float) -> None:
        self.run = uuid.uuid4().hex  # of the system's randomness: seeds and random states have no part in it
        self.watch = Stopwatch("setup")
        self.started_at = started_at
        self._first = max(process_start.wall_clock() - started_at, 0.0)  # seconds before the stopwatch
        self._apart = dict.fromkeys(PARTS, 0.0)  # what the stopwatch does not know, and what it counts to other parts
        self._apart["setup"] = self._first
        self._steps_before = 0.0  # seconds of steps when the last interval ended
        self._end: tuple[dict[str, float], float] | None = None

    def seconds(self) -> dict[str, float]:
        """Of each part, so far."""
        if self._end is not None:
            return dict(self._end[0])
        watched = self.watch.read()
        return {part: apart + watched.get(part, 0.0) for part, apart in self._apart.items()}

    def now(self) -> float:
        """The time of day, or the one at which the count ended, by the process's steady clock: nobody sets it."""
        if self._end is not None:
            return self._end[1]
        return self.started_at + self._first + math.fsum(self.watch.read().values())

    def end(self) -> None:
        """Count no longer."""
        self._end = self._end or (self.seconds(), self.now())

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._end is not None

    def go_on(self, state: Mapping[str, Any], processes: Iterable[Interval], saves: Iterable[Interval]) -> None:
        """Take over what a checkpoint knows of the run, and count the time that was lost since it was saved.

        Args:
            state: as `state` of the process that saved it.
            processes: when earlier processes ran.
            saves: when they waited for saves.
        """
        saved_at: float = state["saved_at"]
        # This process may have started before: what it did until then is in the checkpoint's time already.
        twice = min(max(saved_at - self.started_at, 0.0), self._first)
        self.started_at, self._first = self.started_at + twice, self._first - twice
        self._apart["setup"] -= twice
        lost = lost_to_restart(saved_at, self.started_at, processes, saves)
        for part in PARTS:
            self._apart[part] += state["seconds"].get(part, 0.0) + lost.get(part, 0.0)
        self.run = state["run"]
        self._steps_before = self.seconds()["steps"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as numbers and text."""
        return {"run": self.run, "seconds": self.seconds(), "saved_at": self.now()}

    def end_interval(self, steps: int, skipped: int, data: float) -> None:
        """Correct the time of the steps since the last interval's end.

        Args:
            steps: that were done in it.
            skipped: how many of them changed nothing; they have a mean step's time.
            data: seconds of them in which the device waited for data.
        """
        seconds = self.seconds()["steps"] - self._steps_before
        data = min(data, seconds)
        wasted = (seconds - data) * min(skipped / steps, 1.0) if steps else 0.0
        for part, spent in (("data", data), ("skipped", wasted)):
            self._apart["steps"] -= spent
            self._apart[part] += spent
        self._steps_before = self.seconds()["steps"]
