"""Whole programs that stand still, with `abort`: which line they print, and that no process of them is left over."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.preloaded import left_over, python
from harness.processes import LAUNCHED, free_port

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("hung_run.py")


# each program by a name: its launcher, and the options of `hung_run.main`
PROGRAMS: dict[str, tuple[str, dict[str, object]]] = {
    "worker sleeps": ("lightning", {"place": "training loader", "workers": 1}),
    "rank stands": ("pytorch_lightning", {"place": "forward"}),
    "rank 1 stopped": ("torchrun", {"place": "forward", "how": "stop", "rank": 1}),
    "rank 0 stopped": ("lightning", {"place": "forward", "how": "stop", "rank": 0}),
    "in C code": ("lightning", {"place": "forward", "how": "lock"}),
    "uneven validation": ("torchrun", {"place": "uneven validation", "strategy": "fsdp2"}),
}


def run(folder: Path, launcher: str, options: dict[str, object]) -> tuple[int, str]:
    """The exit code of the program, and what it printed; its end, and that of all its processes, is waited for."""
    defaults = {"how": "wait", "rank": 1, "devices": 2, "strategy": "ddp", "workers": 0}
    command = [str(PROGRAM), json.dumps({**defaults, **options})]
    if launcher == "torchrun":
        port = str(free_port())
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *command]
    packages = ["pytorch_lightning"] if launcher == "pytorch_lightning" else []
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    paths = [str(PROGRAM.parents[2]), environment.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [python(*packages), *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    out = process.communicate()[0]  # which ends when the last process that may print has ended
    assert left_over(folder) == []
    return process.returncode, out


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit code and output by the name of a program. They run beside each other, as all they do is to wait."""
    python(), python("pytorch_lightning")
    with ThreadPoolExecutor(len(PROGRAMS)) as threads:
        folders = {name: tmp_path_factory.mktemp("hung") for name in PROGRAMS}
        futures = {name: threads.submit(run, folders[name], *PROGRAMS[name]) for name in PROGRAMS}
        return {name: future.result() for name, future in futures.items()}


def lines(out: str) -> list[str]:
    return [line.removeprefix("HangWatchdog: ") for line in out.splitlines() if line.startswith("HangWatchdog: ")]


def stacks_of_both(out: str) -> bool:
    return out.count("Thread MainThread (most recent call last):") == 2


def test_a_loader_whose_worker_sleeps_is_named_and_all_processes_end_under_lightnings_launcher(ended):
    """The worker itself, too, which is stuck and does not notice that its parent is gone."""
    code, out = ended["worker sleeps"]
    assert code == 1, out
    behind = [line for line in lines(out) if "rank 1 of 2 on" in line and "is behind: waiting for the training" in line]
    assert len(behind) == 2, out
    assert all(" s: DataLoader over Rows, 1 workers, 1 alive; worker 0" in line for line in behind)
    assert sum("is ended, with exit code 1" in line for line in lines(out)) == 2
    assert stacks_of_both(out)
    assert "gone without a word" not in out  # RankMonitor does not take it for a death


def test_a_rank_that_stands_still_is_named_under_pytorch_lightning_as_well(ended):
    code, out = ended["rank stands"]
    assert code == 1, out
    behind = [line for line in lines(out) if "is behind: in the forward of step 4 for " in line]
    assert (len(behind), all(" s: threading.py" in line for line in behind)) == (2, True), out
    assert stacks_of_both(out)


ENDS = """
import multiprocessing, signal, subprocess, threading
from lightning_tricks._host import exit as _exit

_exit.CHILDREN_SECONDS = 0.2
worker = multiprocessing.get_context("fork").Process(target=signal.pause)
worker.start()
child = subprocess.Popen(["sleep", "1000"])
threading.Thread(target=_exit.end_now, args=(3, [child])).start()
threading.Event().wait()  # the main thread is stuck
"""


def test_end_now_ends_a_process_with_its_workers_and_children(tmp_path):
    done = subprocess.run([python(), "-c", ENDS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_killed(ended, rank):
    """Rank 0 of Lightning's launcher holds the store by which the ranks talk."""
    code, out = ended[f"rank {rank} stopped"]
    assert code, out
    assert f"rank {rank} of 2 on" in out
    assert sum(f"rank {rank} of 2 on" in line and "gives no sign of life" in line for line in lines(out)) == 1, out
    assert out.count("is ended, with exit code 1") == 1


def test_a_rank_in_c_code_with_pythons_lock_shows_its_stack_and_ends(ended):
    code, out = ended["in C code"]
    assert code == 1, out
    assert any("rank 1 of 2 on" in line and "gives no sign of life" in line for line in lines(out)), out
    timer = out.split("Timeout (0:00:", 1)[1]
    assert "in when_told\n" in timer


def test_an_uneven_validation_of_unknown_lengths_is_named_under_fsdp2(ended):
    code, out = ended["uneven validation"]
    assert code, out
    (line,) = {line for line in lines(out) if line.startswith("uneven validation: ")}
    assert line.startswith("uneven validation: rank 1 of 2 on ")
    assert " had 3 batches, rank 0 of 2 on " in line
    assert " is at batch 4: give every rank the same number" in line
    assert stacks_of_both(out)
