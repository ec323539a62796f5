"""When a process started, as the system tells it."""

import os
import time
from pathlib import Path

_PROC = Path("/proc")


def start_ticks(process: int | None = None) -> int | None:
    """The start of a process in clock ticks since the system's start; None where the system does not tell it.

    Some sandboxes give every process the start 0, which is none.

    Args:
        process: its id; None for this process.

    Source: `starttime` in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        text = (_PROC / str(process or "self") / "stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])  # the 22nd field; the program's name may hold spaces
    except (OSError, ValueError, IndexError):  # another system
        return None
    return ticks if ticks > 0 else None


def process_age() -> float | None:
    """Seconds since this process started, exact to a clock tick (10 ms); None where that is not known."""
    ticks = start_ticks()
    if ticks is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return age if age >= 0 else None
