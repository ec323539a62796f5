"""kill -9 anywhere, resume, and the batches are those of the run that was never killed."""

import multiprocessing
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from killed_run import run

from lightning_tricks.data import ShardWriter

STEPS = 8


@pytest.fixture(scope="module")
def launch():
    """Run `killed_run.run` in a process of its own and return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch.callbacks", "lightning_tricks.data"])

    def start(*args, **options):
        process = context.Process(target=run, args=args, kwargs=options)
        process.start()
        process.join(120)
        return process.exitcode

    return start


def make_data(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).integers(0, 64, 4000)
    for name, part in (("train", ids[:3600]), ("val", ids[3600:])):
        with ShardWriter(folder, name, 64) as writer:
            writer.append(part)
        (folder / f"{name}_000000.bin").rename(folder / f"{name}.bin")
    return folder


def lines(folder: Path, log: str = "batches.txt") -> list[str]:
    return (folder / log).read_text().splitlines()


def last_said(log: list[str]) -> dict[tuple[int, int], str]:
    """The rows of each (step, micro-batch), as the last run that came there logged them."""
    return {(int(a), int(b)): rows for a, b, rows in (line.split(" ", 2) for line in log if "validation" not in line)}


@pytest.fixture(scope="module")
def unbroken(launch, tmp_path_factory):
    """Batches of the runs that nobody killed, by accumulation."""
    result = {}
    for accumulate in (1, 4):
        folder = make_data(tmp_path_factory.mktemp("unbroken"))
        assert launch(folder, accumulate=accumulate, max_steps=STEPS) == 0
        result[accumulate] = lines(folder)
    return result


def test_the_unbroken_run_sees_each_batch_once(unbroken):
    for accumulate, log in unbroken.items():
        batches = last_said(log)
        assert list(batches) == [(step, micro) for step in range(STEPS) for micro in range(accumulate)]
        rows = [row for line in batches.values() for row in line.split()[1:]]
        assert len(set(rows)) == len(rows) == STEPS * accumulate * 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_killed_twice_and_resumed_the_batches_are_the_unbroken_ones(
    launch, unbroken, tmp_path, accumulate, num_workers
):
    folder = make_data(tmp_path / "run")
    options = {"accumulate": accumulate, "num_workers": num_workers, "max_steps": STEPS}
    middle = accumulate // 2
    # the second run is killed in the window in which its ModelCheckpoint has saved again, in mid-window
    for kill_at in ((3, middle), (4, middle), (5, accumulate - 1)):
        assert launch(folder, kill_at=kill_at, **options) == -signal.SIGKILL
    assert launch(folder, **options) == 0
    log = lines(folder)
    assert last_said(log) == last_said(unbroken[accumulate])
    # and in the same order: each run goes on where a checkpoint was, and then batch by batch
    order = list(last_said(unbroken[accumulate]))
    seen = [(int(a), int(b)) for a, b in re.findall(r"^(\d+) (\d+) ", "\n".join(log), re.MULTILINE)]
    jumps = [(a, b) for a, b in zip(seen, seen[1:], strict=False) if order.index(b) != order.index(a) + 1]
    assert len(jumps) == 3
    assert all(b[1] == 0 and b[0] % 2 == 0 for _, b in jumps)


