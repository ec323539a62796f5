"""Split the wall time of a run, over its restarts, into parts that add up to it, and print them as one line.

Times of day are in seconds since 1970; an interval is a pair (first, last) of them.
"""

import math
from collections.abc import Iterable, Mapping

Interval = tuple[float, float]

# The parts of a run's wall time, with their names in `breakdown`; `other` is the rest.
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
            first = end  # seconds before it are counted already
    return seconds


def lost_to_restart(
    saved_at: float, started_at: float, processes: Iterable[Interval], saves: Iterable[Interval]
) -> dict[str, float]:
    """Seconds between the save of a checkpoint and the start of the process that resumes it, by part.

    The rest of the save itself counts as `checkpoint`. All other time in which a process ran after `saved_at` is
    `lost`, and time in which no process ran is `down`. The three add up to `started_at - saved_at`, or to 0 if that is
    negative.

    Args:
        saved_at: time of day at which the state in the checkpoint was read.
        started_at: time of day at which the resuming process started.
        processes: intervals in which earlier processes of the run ran, as far as known; they may overlap.
        saves: intervals in which those waited for saves, as far as known.
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

    All are rounded down; then the parts with the largest remainders get one more (largest remainder method).
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


def breakdown(seconds: Mapping[str, float]) -> str:
    """The parts in one line, in percent that add up to 100.0. Parts of 0.0 % are left out, except steps and other.

    Args:
        seconds: of each part in `PARTS`.
    """
    found = tenths_of_percent(seconds)
    shown = [part for part in PARTS if found[part] or part in ("steps", "other")]
    lines = " + ".join(f"{PARTS[part]} {found[part] / 10:.1f} %" for part in shown)
    return f"wall {duration(math.fsum(seconds.values()))} = {lines}"
