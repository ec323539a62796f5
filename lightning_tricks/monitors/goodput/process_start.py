"""When the time of a fit begins: at the start of its process, or now if this is not the process's first fit."""

import os
import sys
import time
from pathlib import Path

wall_clock = time.time
_STAT = Path("/proc/self/stat")
_imported_at = wall_clock()
_has_fitted = False


def fit_start() -> float:
    """Seconds since 1970: the start of the process for its first fit; now for a later fit, and in a notebook.

    Where the system does not tell when the process started, it is the time at which this file was imported.
    """
    global _has_fitted
    is_first, _has_fitted = not _has_fitted, True
    if not is_first or hasattr(sys, "ps1"):  # a notebook may have been open for hours
        return wall_clock()
    age = process_age()
    return _imported_at if age is None else wall_clock() - age


def process_age() -> float | None:
    """Seconds since this process started, exact to a clock tick (10 ms); None where that is not known.

    Source: `starttime` in https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html.
    """
    try:
        fields = _STAT.read_text().rpartition(")")[2].split()  # the program's name may hold spaces
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field of all; since the system's start
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):  # another system
        return None
    return age if started and age >= 0 else None
