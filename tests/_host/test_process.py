"""The start of a process, on which a time limit, the shares of wall time and the identity of a process depend."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_tricks._host import process as _process
from lightning_tricks._host.process import process_age, start_ticks, this_process
from lightning_tricks.guards import stop_signals
from lightning_tricks.monitors import goodput_monitor

linux = pytest.mark.skipif(sys.platform != "linux", reason="the age comes from /proc")


@linux
def test_a_process_knows_its_age():
    assert 0 <= process_age() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    born = Path("/proc/self").stat().st_ctime  # the process's folder is made with it, or when it is first looked at
    assert time.time() - process_age() <= born + 0.5


@pytest.mark.long
@linux
def test_the_age_counts_from_the_start_of_the_process():
    code = (
        "import time; time.sleep(0.3)\n"
        "from lightning_tricks._host.process import process_age\n"
        "assert 0.3 < process_age() < 60, process_age()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@linux
def test_a_process_is_told_from_a_later_one_with_its_id_by_its_start(tmp_path, monkeypatch):
    assert this_process(0, 1).started == start_ticks() == start_ticks(os.getpid())
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text("1 (x) S" + " 0" * 40)
    monkeypatch.setattr(_process, "_PROC", tmp_path)
    assert start_ticks(1) is None  # of a sandbox that gives every process the start 0
    assert start_ticks(2**22 + 1) is None  # above the largest id that a system gives


TEXTS = {
    "empty": "",
    "cut short": "1 (a) b) S 1",
    "a sandbox that gives every process the start 0": "1 (x) S" + " 0" * 40,
    "a start in the future": "1 (x) S" + " 9000000000000" * 40,
    "a system without that clock": None,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_without_a_start_everything_counts_from_the_import(tmp_path, monkeypatch, text):
    if text is None:
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    else:
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "stat").write_text(text)
        monkeypatch.setattr(_process, "_PROC", tmp_path)
    monkeypatch.setattr(goodput_monitor, "_has_fitted", False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    since_import = time.monotonic() - _process._imported
    assert process_age() == pytest.approx(since_import, abs=1.0)
    assert goodput_monitor.fit_start() == pytest.approx(time.time() - since_import, abs=1.0)
    assert time.monotonic() < stop_signals.deadline(since_import / 60 + 5, 5.0)  # five minutes are left
