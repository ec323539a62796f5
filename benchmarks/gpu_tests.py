"""Run the tests marked `gpu` so that no test can take the others with it; also the pytest plugin that this needs.

The result is on disk after each test. A test that crashes its process, hangs past its limit or leaves the device in a
state of error ends one pytest, and another one goes on with the tests that are left.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stage_file import resume, write
from lightning_tricks._host.exit import Deadline

ROOT = Path(__file__).resolve().parents[1]
# Every file with tests marked `gpu`, those that take least first, which no GPU has run yet; a minute or two each later.
FILES = (
    "tests/models/test_attention.py", "tests/gpu/test_snapshot_cuda.py", "tests/gpu/test_run_ledger_cuda.py",
    "tests/gpu/test_cuda_graphs_cuda.py",
    "tests/gpu/test_adamw_bf16_state_cuda.py", "tests/gpu/test_precision.py", "tests/gpu/test_monitors.py",
    "tests/gpu/test_strategies.py", "tests/gpu/test_cuda.py",
)  # fmt: skip
DRY_FILES = ("tests/gpu/test_cuda.py",)  # all are skipped without a GPU; one file shows as much
TEST_SECONDS = 120.0
_RESULT = "LIGHTNING_TRICKS_GPU_TESTS"  # environment variable: the file that the plugin goes on with
_STDERR = os.dup(2)  # before pytest captures it: where the stacks of a test that hangs are written


def run_tests(out: Path, dry: bool, seconds: float, files: Sequence[str]) -> None:
    """Run them; exit code 1 if one failed or was not reached.

    Args:
        out: result file, written after each test; tests that it holds are not run again.
        dry: whether the files are fewer than all.
        seconds: when to stop and leave the rest out.
        files: as pytest takes them, from the root of the checkout.
    """
    from benchmarks import machine  # here: this module is a plugin too, and pytest shall import torch itself

    end = time.monotonic() + seconds
    fresh = {"stage": "tests", "machine": machine.describe(), "dry": dry}
    write(out, resume(out, {**fresh, "collected": None, "running": None, "tests": {}}))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "benchmarks.gpu_tests", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-m", "gpu", "--continue-on-collection-errors", *files]
    environment = os.environ | {
        _RESULT: str(out.resolve()), "LIGHTNING_TRICKS_TEST_SECONDS": str(TEST_SECONDS),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of what else is installed there, nothing is needed
    }  # fmt: skip
    while True:
        try:
            subprocess.run(command, cwd=ROOT, env=environment, timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            break
        result = json.loads(out.read_text(encoding="utf-8"))
        if result["running"] is None:
            break
        result["tests"][result["running"]] = {"outcome": "failed", "seconds": None, "why": "crashed or hung"}
        result["running"] = None
        write(out, result)
    result = json.loads(out.read_text(encoding="utf-8"))
    outcomes = [test["outcome"] for test in result["tests"].values()]
    if "failed" in outcomes or not outcomes or len(outcomes) < (result["collected"] or 1):
        sys.exit(1)


class Progress:
    """Writes each test's outcome as it ends, ends the process at a test that hangs, and skips what is done.

    Args:
        path: the result file.
        limit: seconds for one test.
    """

    def __init__(self, path: Path, limit: float) -> None:
        self.path, self.limit = path, limit
        self.result = json.loads(path.read_text(encoding="utf-8"))
        self.now: dict[str, Any] = {}
        self.deadline = Deadline(file=_STDERR)

    @pytest.hookimpl(trylast=True)  # when the marks have chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.result["collected"] is None:
            self.result["collected"] = len(items)
        items[:] = [item for item in items if item.nodeid not in self.result["tests"]]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.result["tests"][report.nodeid] = {"outcome": "failed", "seconds": None, "why": report.longreprtext}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = {"outcome": "passed", "seconds": time.monotonic()}
        self.result["running"] = nodeid
        write(self.path, self.result)
        self.deadline.set(self.limit)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.now |= {"outcome": "failed", "why": report.longreprtext[-3000:]}
        elif report.skipped and self.now["outcome"] == "passed":
            self.now["outcome"] = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.deadline.cancel()
        self.now["seconds"] = round(time.monotonic() - self.now["seconds"], 2)
        self.result["tests"][nodeid] = self.now
        self.result["running"] = None
        write(self.path, self.result)
        if self.now["outcome"] == "failed" and not device_answers():
            self.result["running"] = nodeid  # another process goes on; this test stays failed
            write(self.path, self.result)
            os._exit(1)


def device_answers() -> bool:
    """Whether CUDA still works in this process: some errors are there to stay."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Start where `run_tests` started this process."""
    if _RESULT in os.environ:
        limit = float(os.environ["LIGHTNING_TRICKS_TEST_SECONDS"])
        config.pluginmanager.register(Progress(Path(os.environ[_RESULT]), limit))
