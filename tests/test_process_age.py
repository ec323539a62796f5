"""The start of a process, on which a time limit, the shares of wall time and the identity of a process depend."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_tricks import _process_age
from lightning_tricks._process_age import process_age, start_ticks
from lightning_tricks.guards.hang_watchdog.place import started_at
from lightning_tricks.guards.preemption import time_limit
from lightning_tricks.monitors import goodput_monitor

linux = pytest.mark.skipif(sys.platform != "linux", reason="the age comes from /proc")


def test_a_process_knows_its_age():
    age = process_age()
    assert age is None or 0 <= age <= time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "linux":
        born = Path("/proc/self").stat().st_ctime  # the process's folder is made with it, or when it is first looked at
        assert age is not None
        assert time.time() - age <= born + 0.5


@linux
def test_a_limit_counts_from_the_start_of_the_process():
    code = (
        "import time; before = time.monotonic()\n"
        "from lightning_tricks.guards.preemption.time_limit import process_start\n"
        "assert before - 60 < process_start() <= before, (process_start(), before)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@linux
def test_a_process_is_told_from_a_later_one_with_its_id_by_its_start(tmp_path, monkeypatch):
    assert started_at(os.getpid()) == str(start_ticks()) == str(start_ticks(os.getpid()))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text("1 (x) S" + " 0" * 40)
    monkeypatch.setattr(_process_age, "_PROC", tmp_path)
    assert started_at(1) == ""  # of a sandbox that gives every process the start 0
    assert started_at(2**22 + 1) == ""  # above the largest id that a system gives


TEXTS = {
    "empty": "",
    "cut short": "1 (a) b) S 1",
    "a sandbox that gives every process the start 0": "1 (x) S" + " 0" * 40,
    "a start in the future": "1 (x) S" + " 9000000000000" * 40,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_without_a_start_everything_counts_from_the_import(tmp_path, monkeypatch, text):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text(text)
    monkeypatch.setattr(_process_age, "_PROC", tmp_path)
    monkeypatch.setattr(goodput_monitor, "_has_fitted", False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert process_age() is None
    assert goodput_monitor.fit_start() == goodput_monitor._imported_at
    assert time_limit.process_start() == time_limit._imported < time.monotonic()
    minutes = (time.monotonic() - time_limit._imported) / 60 + 5  # a run with five minutes left goes on
    assert time.monotonic() < time_limit.deadline(minutes, 5.0)


def test_a_system_without_that_clock_knows_no_age(monkeypatch):
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert process_age() is None
