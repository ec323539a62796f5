"""kill -9 anywhere, resume, and the batches are those of the run that was never killed."""

import multiprocessing
import re
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from harness.processes import free_port
from harness.token_files import write_token_files
from killed_run import run

pytestmark = pytest.mark.long

STEPS = 8


class Launcher:
    """Runs `killed_run.run` in processes of their own; they start from one that has imported everything."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["lightning.pytorch.callbacks", "lightning_tricks.data"])

    def __call__(self, *args, **options) -> int:
        return self._finish([self.context.Process(target=run, args=args, kwargs=options)])[0]

    def many(self, folder: Path, world: int, **options) -> list[int]:
        options |= {"world": world, "port": free_port()}
        return self._finish(
            [self.context.Process(target=run, args=(folder,), kwargs=options | {"rank": r}) for r in range(world)]
        )

    def _finish(self, processes) -> list[int]:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def launch():
    return Launcher()


def lines(folder: Path, log: str = "batches.txt") -> list[str]:
    return (folder / log).read_text().splitlines()


def validations(log: list[str]) -> list[str]:
    return [line for line in log if "validation" in line]


def last_said(log: list[str]) -> dict[tuple[int, int], str]:
    """The rows of each (step, micro-batch), as the last run that came there logged them."""
    return {(int(a), int(b)): rows for a, b, rows in (line.split(" ", 2) for line in log if "validation" not in line)}


@pytest.fixture(scope="module")
def unbroken(launch, tmp_path_factory):
    """Batches of the runs that nobody killed, by accumulation."""
    result = {}
    for accumulate in (1, 4):
        folder = write_token_files(tmp_path_factory.mktemp("unbroken"), train=3600, tokens=3700)
        assert launch(folder, accumulate=accumulate, max_steps=STEPS) == 0
        result[accumulate] = lines(folder)
    return result


def test_the_unbroken_run_sees_each_batch_once(unbroken):
    for accumulate, log in unbroken.items():
        batches = last_said(log)
        assert list(batches) == [(step, micro) for step in range(STEPS) for micro in range(accumulate)]
        rows = [row for line in batches.values() for row in line.split()[1:]]
        assert len(set(rows)) == len(rows) == STEPS * accumulate * 2


@pytest.mark.parametrize(("accumulate", "num_workers"), [(1, 0), (4, 2)])
def test_killed_twice_and_resumed_the_batches_are_the_unbroken_ones(
    launch, unbroken, tmp_path, accumulate, num_workers
):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
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
    jumps = [(a, b) for a, b in pairwise(seen) if order.index(b) != order.index(a) + 1]
    assert len(jumps) == 3
    assert all(b[1] == 0 and b[0] % 2 == 0 for _, b in jumps)


def test_a_finished_run_is_carried_on_with_more_steps(launch, unbroken, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    once_at_the_end = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "accumulate": 4}
    assert launch(folder, max_steps=4, **once_at_the_end) == 0
    assert launch(folder, max_steps=STEPS, **once_at_the_end) == 0
    log = lines(folder)
    assert [line for line in log if "validation" not in line] == [x for x in unbroken[4] if "validation" not in x]
    # still in its only epoch, as if it had never stopped
    assert validations(log) == ["4 validation in epoch 0", "8 validation in epoch 0"]


def test_validation_comes_at_the_same_steps_after_a_kill(launch, unbroken, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    launch(folder, kill_at=(4, 2), accumulate=4, max_steps=STEPS)
    launch(folder, kill_at=(5, 3), accumulate=4, max_steps=STEPS)
    launch(folder, accumulate=4, max_steps=STEPS)
    expected = [f"{step} validation in epoch 0" for step in (2, 4, 6, 8)]
    assert validations(lines(folder)) == validations(unbroken[4]) == expected


def rows_by_step(log: list[str]) -> dict[int, set[str]]:
    result: dict[int, set[str]] = {}
    for line in log:
        if "validation" not in line:
            step, _, _, *rows = line.split()
            result.setdefault(int(step), set()).update(rows)
    return result


def test_a_resume_may_split_the_global_batch_in_another_way(launch, unbroken, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    launch(folder, kill_at=(5, 0), accumulate=1, micro_batch_size=8, max_steps=STEPS)
    assert launch(folder, accumulate=4, micro_batch_size=2, max_steps=STEPS, log="after.txt") == 0
    after = rows_by_step(lines(folder, "after.txt"))
    assert list(after) == [4, 5, 6, 7]
    assert after == {step: rows for step, rows in rows_by_step(unbroken[4]).items() if step >= 4}


def test_a_resume_with_a_smaller_global_batch_goes_on_with_the_next_row(launch, unbroken, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    launch(folder, kill_at=(5, 0), micro_batch_size=8, max_steps=STEPS)
    assert launch(folder, micro_batch_size=2, max_steps=STEPS, log="after.txt") == 0
    after = rows_by_step(lines(folder, "after.txt"))
    assert list(after) == [4, 5, 6, 7]
    # four steps of 2 rows are the fifth step of 8 rows
    assert set().union(*after.values()) == rows_by_step(unbroken[4])[4]


def test_without_max_steps_an_epoch_is_a_pass_over_the_data(launch, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    epochs = {
        "max_steps": 0,
        "max_epochs": 2,
        "accumulate": 4,
        "micro_batch_size": 20,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
    }
    assert launch(folder, kill_at=(7, 1), **epochs) == -signal.SIGKILL
    assert launch(folder, **epochs) == 0
    # 3600 // 8 - 1 = 449 windows, 80 a step: 5 steps a pass
    assert list(last_said(lines(folder))) == [(step, micro) for step in range(10) for micro in range(4)]
    assert validations(lines(folder)) == ["5 validation in epoch 0", "10 validation in epoch 1"]


def test_overfitting_takes_the_same_batches_every_epoch(launch, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    assert launch(folder, max_steps=6, overfit_batches=2, val_check_interval=1.0, check_val_every_n_epoch=1) == 0
    rows = [line.split(" ", 2)[2] for line in lines(folder) if "validation" not in line]
    assert rows == rows[:2] * 3
    assert rows[0] != rows[1]


def test_two_processes_see_per_step_what_one_sees(launch, unbroken, tmp_path):
    folder = write_token_files(tmp_path / "run", train=3600, tokens=3700)
    assert launch.many(folder, 2, accumulate=2, max_steps=STEPS) == [0, 0]
    assert rows_by_step(lines(folder)) == rows_by_step(unbroken[4])
    # 100 validation tokens: 13 windows of 8, each once on one of the two, four times
    assert sorted(Counter(lines(folder, "batches.val")).values()) == [4] * 13
