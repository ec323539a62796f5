"""Kills and full disks at any moment of a save and of a training.

In a save: what is there is whole, and the next run goes on. In a training: losses, norms, learning rates, data and
final weights are those of the unbroken run.
"""

import contextlib
import json
import multiprocessing
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import processes
from harness.processes import Beside, free_port
from harness.token_files import write_token_files
from kill_moments import STEPS, Case, Moments, be_quiet, run, save_once_more

from lightning_tricks.checkpoints.record import damage, read_record

pytestmark = pytest.mark.long

FORK = multiprocessing.get_context("fork")

# ---- in a save

SAVES = [(how, asynchronous) for how in ("file", "link") for asynchronous in (False, True)]
KINDS = ("SIGKILL", "ENOSPC")


def attempt(folder: Path, save: tuple[str, bool], number: int, kind: str, temporary: Path) -> tuple[int, int]:
    """Save in a process to which something happens at one moment; its exit code, and the moments that it came to."""
    listen, say = FORK.Pipe(duplex=False)

    def child() -> None:
        be_quiet()
        tempfile.tempdir = str(temporary)
        moments = Moments("files", number, kind)
        moments.watch()
        with contextlib.suppress(OSError):
            save_once_more(folder, *save)
        say.send(moments.seen["files"])

    process = FORK.Process(target=child)
    process.start()
    say.close()
    process.join()
    with contextlib.suppress(EOFError):
        return process.exitcode, listen.recv()
    return process.exitcode, 0


def check_whole(folder: Path) -> int:
    """Every checkpoint is whole to the byte, and opens; the step to which `last.ckpt` leads."""
    paths = list(folder.glob("*.ckpt"))
    for path in paths:
        assert damage(path, read_record(path)) is None
    content = torch.load(folder / "last.ckpt", weights_only=True)
    assert content["global_step"] == read_record(folder / "last.ckpt").step
    hidden = [path.name for path in folder.iterdir() if path not in paths]
    assert all(name.endswith((".saving", ".replaced")) for name in hidden)
    assert len(hidden) <= 2, "the next save removes what a killed one left"
    return int(content["global_step"])


def save_at_all_moments(tmp_path: Path, how: str, asynchronous: bool) -> None:
    """Twelve moments from a first change of a file to the last one, and two around the end, each with every kind."""
    folder, temporary, save = tmp_path / "saved", tmp_path / "temporary", (how, asynchronous)
    folder.mkdir()
    temporary.mkdir()
    for _ in range(2):
        assert attempt(folder, save, 0, "", temporary)[0] == 0
    _, count = attempt(folder, save, 0, "", temporary)
    assert count > 20
    draw = random.Random(f"{how} {asynchronous}")
    for number in [*sorted(draw.sample(range(1, count - 5), 10)), *range(count - 5, count + 1, 2)]:
        for kind in KINDS:
            before = check_whole(folder)
            code, _ = attempt(folder, save, number, kind, temporary)
            assert code == (-signal.SIGKILL if kind == "SIGKILL" else 0)
            assert before <= check_whole(folder) <= before + 2
    before = check_whole(folder)
    assert attempt(folder, save, 0, "", temporary)[0] == 0
    assert check_whole(folder) > before
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert (folder / "last.ckpt").is_symlink() == (how == "link")
    assert not list(temporary.iterdir()), "nothing is staged on another file system"


# ---- in a training

CASES = {
    "tokens": Case(),
    "tokens, workers, accumulation, bf16": Case(workers=2, accumulate=4, precision="bf16"),
    "tokens, fp16 with its scaler": Case(accumulate=4, precision="fp16"),
    "tokens, saved in the background": Case(accumulate=4, asynchronous=True),
    "foreign loader": Case(data="foreign", accumulate=4),
    "foreign loader, workers": Case(data="foreign", workers=2),
    "DDP": Case(world=2, accumulate=4),
    "FSDP2": Case(world=2, strategy="fsdp2", workers=1, precision="bf16"),
}


def launch(folder: Path, case: Case, kill: tuple[str, int] = ("", 0)) -> list[int]:
    """Run the ranks of a training; their exit codes. Where a rank dies, the others are ended."""
    port = free_port() if case.world > 1 else 0
    victim = 0 if kill[0] in ("save", "fsync") else case.world - 1  # rank 0 writes more than the others
    ranks = [
        FORK.Process(target=run, args=(folder, case, kill if rank == victim else ("", 0), rank, port))
        for rank in range(case.world)
    ]
    for process in ranks:
        process.start()
    ranks[victim].join()
    for process in ranks:
        if ranks[victim].exitcode != 0:
            process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def said(folder: Path, rank: int) -> dict[tuple[str, int], set[str]]:
    """All that a rank has written of each step and each validation; a kill may have cut the last line."""
    found: dict[tuple[str, int], set[str]] = {}
    for line in (folder / f"log.{rank}").read_text().splitlines():
        what, step, content = json.loads(line)
        found.setdefault((what, step), set()).add(json.dumps(content))
    return found


def places(case: Case, saved: Path) -> dict[str, int]:
    """How often the next run will come to each place before its end, at least."""
    record = read_record(saved) if saved.exists() else None
    steps = STEPS - (record.step if record else 0)
    found = {"step": steps * case.accumulate, "window": steps * (case.accumulate - 1), "validation": steps}
    return found | {"save": 20 * (steps // 2), "fsync": 2 * (steps // 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("killed"), train=3600, tokens=3700)


def kill_three_times(folder: Path, name: str) -> None:
    """Train, and train again with three kills, by the processes that a process of this one's own starts."""
    case = CASES[name]
    unbroken, broken = folder / f"{name}, unbroken", folder / f"{name}, broken"
    unbroken.mkdir()
    broken.mkdir()
    assert launch(unbroken, case) == [0] * case.world
    draw = random.Random(name)  # the same moments in every session of the tests
    kinds = [place for place, times in places(case, broken / "none").items() if times]
    for place in draw.sample(kinds, 3):
        times = places(case, broken / "saved" / "last.ckpt")[place]
        assert -signal.SIGKILL in launch(broken, case, (place, draw.randint(1, times)))
    assert launch(broken, case) == [0] * case.world


@pytest.fixture(scope="module")
def wait_for(folder, tmp_path_factory) -> Iterator[Beside]:
    runs = {str(save): (save_at_all_moments, tmp_path_factory.mktemp("saves"), *save) for save in SAVES}
    runs |= {name: (kill_three_times, folder, name) for name in CASES}
    with processes.processes(runs | {"two, then one": (change_of_world, folder)}) as wait:
        yield wait


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_whatever_happens_in_a_save_every_checkpoint_is_whole_and_the_next_run_goes_on(wait_for, save):
    wait_for(str(save))


@pytest.mark.parametrize("name", CASES)
def test_killed_three_times_it_is_the_unbroken_run(wait_for, folder, name):
    wait_for(name)
    for rank in range(CASES[name].world):
        expected = said(folder / f"{name}, unbroken", rank)
        assert {what for what, _ in expected} == {"step", "validation", "weights"}
        assert len(expected) == STEPS + STEPS // 2 + 1
        assert said(folder / f"{name}, broken", rank) == expected


def rows(folder: Path, world: int, first_step: int) -> dict[int, set[str]]:
    """The hashes of the batches that all ranks together took for each step from one on."""
    found: dict[int, set[str]] = {}
    for rank in range(world):
        for (what, step), contents in said(folder, rank).items():
            if what == "step" and step >= first_step:
                found.setdefault(step, set()).update(entry[0] for entry in json.loads(contents.pop())[:-1])
    return found


def change_of_world(folder: Path) -> None:
    """Train in two processes, and again with a kill and the rest in one."""
    two, one = Case(world=2, accumulate=2), Case(accumulate=4)
    unbroken, broken = folder / "two processes", folder / "two, then one"
    unbroken.mkdir()
    broken.mkdir()
    assert launch(unbroken, two) == [0, 0]
    assert -signal.SIGKILL in launch(broken, two, ("step", 11))
    (broken / "log.0").unlink()
    assert launch(broken, one) == [0]


def test_one_process_goes_on_with_the_rows_of_two(wait_for, folder):
    wait_for("two, then one")
    unbroken, broken = folder / "two processes", folder / "two, then one"
    assert rows(broken, 1, 5) == rows(unbroken, 2, 5)
    assert len(rows(broken, 1, 1)) == STEPS - 4  # it went on from the checkpoint of step 4
