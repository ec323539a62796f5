"""The wall time of a run by part, over this process and the processes before it."""

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
        self.run = uuid.uuid4().hex  # from the system's randomness: no random state changes
        self.watch = Stopwatch("setup")
        self.started_at = started_at
        self._before_watch = max(process_start.wall_clock() - started_at, 0.0)  # seconds before the stopwatch
        self._corrections = dict.fromkeys(PARTS, 0.0)  # added to the stopwatch's seconds of each part
        self._corrections["setup"] = self._before_watch
        self._steps_before = 0.0  # seconds of steps when the last interval ended
        self._end: tuple[dict[str, float], float] | None = None

    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far."""
        if self._end is not None:
            return dict(self._end[0])
        watched = self.watch.read()
        return {part: correction + watched.get(part, 0.0) for part, correction in self._corrections.items()}

    def now(self) -> float:
        """The time of day, or that of `end`. It advances by the steady clock, which nobody can set back."""
        if self._end is not None:
            return self._end[1]
        return self.started_at + self._before_watch + math.fsum(self.watch.read().values())

    def end(self) -> None:
        """Count no longer."""
        self._end = self._end or (self.seconds(), self.now())

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return self._end is not None

    def resume(self, state: Mapping[str, Any], processes: Iterable[Interval], saves: Iterable[Interval]) -> None:
        """Take over what a checkpoint knows of the run, and count the time that was lost since it was saved.

        Args:
            state: as `state` of the process that saved it.
            processes: when earlier processes ran.
            saves: when they waited for saves.
        """
        saved_at: float = state["saved_at"]
        # This process may have started before the save: its time until then is in the checkpoint already.
        overlap = min(max(saved_at - self.started_at, 0.0), self._before_watch)
        self.started_at, self._before_watch = self.started_at + overlap, self._before_watch - overlap
        self._corrections["setup"] -= overlap
        lost = lost_to_restart(saved_at, self.started_at, processes, saves)
        for part in PARTS:
            self._corrections[part] += state["seconds"].get(part, 0.0) + lost.get(part, 0.0)
        self.run = state["run"]
        self._steps_before = self.seconds()["steps"]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: numbers and text only."""
        return {"run": self.run, "seconds": self.seconds(), "saved_at": self.now()}

    def end_interval(self, steps: int, skipped: int, data: float) -> None:
        """End a logging interval: take waits for data and skipped steps out of the time of its steps.

        Args:
            steps: number of steps in the interval.
            skipped: number of steps that changed nothing; each is taken to have the mean step's time.
            data: seconds of the steps in which the device waited for data.
        """
        seconds = self.seconds()["steps"] - self._steps_before
        data = min(data, seconds)
        wasted = (seconds - data) * min(skipped / steps, 1.0) if steps else 0.0
        for part, spent in (("data", data), ("skipped", wasted)):
            self._corrections["steps"] -= spent
            self._corrections[part] += spent
        self._steps_before = self.seconds()["steps"]
