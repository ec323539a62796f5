"""Where the wall time of a run went: parts that add up to it, over restarts too.

Times of day are in seconds since 1970, intervals are (first, last) of such times.
"""

import math
from collections.abc import Iterable, Mapping

Interval = tuple[float, float]

# The parts of a run's wall time, with their names in the bill; `other` is the rest.
PARTS = {
    "steps": "steps",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "data": "data wait",
    "compile": "compilation",
    "setup": "set-up",
    "skipped": "skipped steps",
    "lost": "lost work",
    "down": "down time",
    "other": "other",
}


def covered(intervals: Iterable[Interval], first: float, last: float) -> float:
    """Seconds between `first` and `last` that lie in at least one of `intervals`."""
    seconds = 0.0
    for begin, end in sorted(intervals):
        begin, end = max(begin, first), min(end, last)
        if end > begin:
            seconds += end - begin
            first = end  # what comes before is counted
    return seconds


def lost_to_restart(
    saved_at: float, started_at: float, processes: Iterable[Interval], saves: Iterable[Interval]
) -> dict[str, float]:
    """The time between the save of a checkpoint and the start of the process that goes on from it, by part.

    The rest of the save itself is time of checkpoints. Everything else that a process did after it is lost, and while
    no process ran, the run was down. The three add up to `started_at - saved_at`, or to 0 if that is negative.

    Args:
        saved_at: when the checkpoint's content was taken.
        started_at: when the process that goes on from it started.
        processes: when earlier processes of the run ran, as far as that is known; they may overlap.
        saves: when they waited for saves, as far as that is known.
    """
    ran = covered(processes, saved_at, started_at)
    own_save = [save for save in saves if save[0] <= saved_at <= save[1]]
    saving = min(covered(own_save, saved_at, started_at), ran)
    return {"checkpoint": saving, "lost": ran - saving, "down": max(started_at - saved_at, 0.0) - ran}


def fractions(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each part as a fraction of all parts together; 0 where there is no time at all."""
    wall = math.fsum(seconds.values())
    return {part: spent / wall if wall else 0.0 for part, spent in seconds.items()}


def tenths_of_percent(seconds: Mapping[str, float]) -> dict[str, int]:
    """Each part in units of 0.1 %, rounded so that all together are 1000.

    All are rounded down, then those with the largest remainders up, as seats are given to parties.
    """
    exact = {part: 1000 * fraction for part, fraction in fractions(seconds).items()}
    found = {part: math.floor(value) for part, value in exact.items()}
    missing = 1000 - sum(found.values()) if any(exact.values()) else 0
    for part in sorted(exact, key=lambda part: found[part] - exact[part])[:missing]:
        found[part] += 1
    return found


def duration(seconds: float) -> str:
    """A time in its two largest units, such as `3 h 12 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))


def bill(seconds: Mapping[str, float]) -> str:
    """The parts in one line, in percent that add up to 100.0; a part of 0.0 % is left out, but for steps and other.

    Args:
        seconds: of each of `PARTS`.
    """
    found = tenths_of_percent(seconds)
    shown = [part for part in PARTS if found[part] or part in ("steps", "other")]
    lines = " + ".join(f"{PARTS[part]} {found[part] / 10:.1f} %" for part in shown)
    return f"wall {duration(math.fsum(seconds.values()))} = {lines}"
