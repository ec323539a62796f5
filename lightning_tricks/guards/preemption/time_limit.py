"""The moment at which a run has to leave: its own limit, or the end of its SLURM job."""

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from lightning_tricks._process import process_age

MARGIN_FRACTION = 0.1  # of a SLURM job: a short job shall train as well


def seconds_left_in_job(environment: Mapping[str, str], margin_minutes: float, now: float) -> float:
    """Seconds until a SLURM job has to be left; infinite where the environment does not tell its end.

    Args:
        environment: of the process. SLURM gives `SLURM_JOB_END_TIME` and `SLURM_JOB_START_TIME`, in Unix time.
        margin_minutes: before the job's end, and never more than a tenth of the job.
        now: in Unix time.
    """
    try:
        end = float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return math.inf
    margin = 60 * margin_minutes
    with suppress(KeyError, ValueError):
        margin = min(margin, MARGIN_FRACTION * (end - float(environment["SLURM_JOB_START_TIME"])))
    return end - margin - now


def deadline(max_minutes: float | None, margin_minutes: float) -> float:
    """The moment to leave, on the clock of `time.monotonic`: the earlier of both; infinite where there is neither."""
    own = math.inf if max_minutes is None else time.monotonic() - process_age() + 60 * max_minutes
    return min(own, time.monotonic() + seconds_left_in_job(os.environ, margin_minutes, time.time()))
