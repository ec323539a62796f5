"""An option of a guard that is out of its range is refused in one line, which names it, its value and the remedy."""

import math
from typing import Any

import pytest

from lightning_tricks import callbacks
from lightning_tricks._core.errors import UsageError

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("BatchSizeWarmup", {}, ": stages=None, double_every=None: give one of the two"),
    ("BatchSizeWarmup", {"stages": {0: 1}, "start": 2}, ".start=2: it is for double_every"),
    ("BatchSizeWarmup", {"double_every": 0}, ".double_every=0: give 1 or more"),
    ("BatchSizeWarmup", {"double_every": 3, "unit": "epochs"}, ".unit='epochs': give one of steps, tokens"),
    ("EMA", {"decay": 1.0}, ": decay=1.0: give a number between 0 and 1, such as 0.999"),
    ("GCControl", {"every_n_steps": 0}, ".every_n_steps=0: give 1 or more"),
    ("HangWatchdog", {"limit_seconds": 0.0}, ".limit_seconds=0.0: give more than 0 seconds"),
    ("HangWatchdog", {"first_step_seconds": 3.0}, ".first_step_seconds=3.0: give at least limit_seconds=300.0"),
    ("LRScalingRule", {}, ": reference_batch_tokens=None, reference_batch_samples=None: give one of the two"),
    ("LRScalingRule", {"reference_batch_tokens": 0}, ".reference_batch_tokens=0: give 1 or more"),
    ("LRScalingRule", {"reference_batch_tokens": 4, "rule": "none"}, ".rule='none': give one of linear, sqrt"),
    ("Preemption", {"max_minutes": math.nan}, ".max_minutes=nan: give more than 0"),
    ("Preemption", {"slurm_margin_minutes": -1}, ".slurm_margin_minutes=-1: give 0 or more"),
    ("Preemption", {"exit_code": 256}, ".exit_code=256: give a number from 0 to 255"),
    ("RankMonitor", {"grace_seconds": -1}, ".grace_seconds=-1: give 0 or more"),
    ("SafeCheckpoint", {"every_n_train_steps": 0}, ": every_n_train_steps=0: give a whole number of at least 1"),
    ("SafeCheckpoint", {"keep_best": 1.5}, ": keep_best=1.5: give a whole number of at least 0"),
    ("SafeCheckpoint", {"every_n_minutes": 0}, ": every_n_minutes=0: give a number above 0"),
    ("SafeCheckpoint", {"mode": "low"}, ": mode='low': give 'min' or 'max'"),
    ("SpikeRollback", {"sigmas": 0}, ".sigmas=0: give a number of standard deviations above 0"),
    ("SpikeRollback", {"window_steps": 3}, ".window_steps=3: give 4 or more"),
    ("StepGuard", {"sigmas": 0}, ".sigmas=0: give a number of standard deviations above 0"),
    ("StepGuard", {"norm_ratio": -1}, ".norm_ratio=-1: give a number from 0 on"),
    ("StepGuard", {"window_steps": 1}, ": window_steps=1, active_after_steps=64: a deviation needs 2 steps"),
    ("StepGuard", {"max_skipped_steps": 0}, ".max_skipped_steps=0: give 1 or more"),
    ("TailAverage", {"horizon_steps": 0}, ": horizon_steps=0: give at least 1"),
    ("TotalTokens", {"total_tokens": 1.5}, ".total_tokens=1.5: give a whole number above 0"),
    ("TotalTokens", {"total_tokens": True}, ".total_tokens=True: give a whole number above 0"),
]


@pytest.mark.parametrize(("guard", "options", "line"), REFUSED, ids=str)
def test_an_option_out_of_range_is_refused_in_one_line(guard, options, line):
    with pytest.raises(UsageError) as refused:
        getattr(callbacks, guard)(**options)
    assert str(refused.value).startswith(guard + line)
    assert "\n" not in str(refused.value)
