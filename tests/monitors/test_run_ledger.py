"""RunLedger and `ledger diff`: planted faults are found at their step, also after a restart."""

import contextlib
import json
import random
import shutil

import pytest
from harness import processes
from harness.runs import On
from ledger_run import ROWS, STEPS, Plant, Rows, failing, fit, flip_a_bit

from lightning_tricks import RunLedger
from lightning_tricks.logs.ledger_diff import check, compare, name_of
from lightning_tricks.logs.ledger_file import read_ledger
from lightning_tricks.monitors import _bit_sums as sums

TWENTY = range(20)
AT_END = next(seed for seed in TWENTY if Plant(1, "bit", seed).at_end)


def diff(one, other):
    return compare(read_ledger(one), read_ledger(other), 0.01)


def where(seed):
    """A step to plant a fault at, anew for each seed."""
    return random.Random(seed).randrange(1, STEPS)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    fit(folder)
    return folder


def test_a_run_is_equal_to_itself(clean, tmp_path):
    fit(tmp_path)
    found = diff(clean, tmp_path)
    assert not found.differs
    assert found.steps == list(range(STEPS))
    assert {name: part.equal for name, part in found.parts.items()} == dict.fromkeys(found.parts, STEPS)
    assert list(found.lines())[-1] == "ledger diff: no difference"


def test_a_flipped_bit_of_a_weight_is_found_at_its_step_20_of_20(clean, tmp_path):
    for seed in TWENTY:
        fit(tmp_path / str(seed), Plant(where(seed), "bit", seed))
        step, parts = diff(clean, tmp_path / str(seed)).first()
        assert step == where(seed)
        assert "weights" in parts


def test_two_swapped_rows_and_another_dropout_seed_are_found_at_their_step_20_of_20(clean, tmp_path):
    for seed in TWENTY:
        step, swap, other = where(seed), tmp_path / f"swap {seed}", tmp_path / f"seed {seed}"
        fit(swap, data=Rows(swap=(step, *random.Random(seed).sample(range(ROWS), 2))), max_steps=step + 1)
        found, parts = diff(clean, swap).first()
        assert (found, parts[0]) == (step, "batch")
        fit(other, Plant(step, "seed", seed), max_steps=step + 1)
        assert diff(clean, other).first() == (step, ["torch_random", "loss", "optimizer", "weights"])


def resumed(clean, folder, *plants, **options):
    """A run that goes on after step 3 of the clean one, in a folder with its ledger."""
    (folder / "saved").mkdir(parents=True)
    shutil.copy(clean / "ledger.jsonl", folder)
    (checkpoint,) = (clean / "saved").glob("*step*3*.ckpt")
    fit(folder, *plants, ckpt_path=checkpoint, **options)


def test_faults_after_a_restart_are_found_at_their_step(clean, tmp_path):
    resumed(clean, tmp_path / "sound")
    sound = diff(clean, tmp_path / "sound")
    assert not sound.differs
    assert {part.equal for part in sound.parts.values()} == {STEPS}
    ledger = read_ledger(tmp_path / "sound")
    assert [line["start"] for line in ledger.starts] == [0, 3]
    said, wrong = check(ledger)
    assert "repeated after a restart: 3 steps, from 3 to 5" in said
    assert wrong == []
    for name, step, plants, data, first in (
        ("bit", 4, [Plant(4, "bit", 3)], None, None),
        ("seed", 3, [Plant(3, "seed")], None, "torch_random"),
        ("swap", 5, [], Rows(swap=(5, 0, 3)), "batch"),
    ):
        resumed(clean, tmp_path / name, *plants, data=data)
        found, parts = diff(clean, tmp_path / name).first()
        assert found == step
        assert parts[0] == (first or parts[0])
        assert f"a repeated step is not as it was: {name_of(parts[0])} at step {step}" in problems(tmp_path / name)


def problems(folder):
    return check(read_ledger(folder))[1]


# ----------------------------------------------------------------------------------------------------------- processes


def in_two_processes(rank, folder):
    runs = {
        "clean": {},
        "again": {},
        "swap": {"data": Rows(2, swap=(3, 0, 3))},  # one row of each process
        "bit": {"plants": [Plant(2, "bit", AT_END, rank=1)]},
        "no dropout": {"dropout": 0},
        "seed": {"plants": [Plant(1, "seed", rank=1)]},
        "windows": {"data": Rows(1), "accumulate_grad_batches": 2},
    }
    for name, options in runs.items():
        options = {"data": Rows(2), **options}
        fit(folder / name, *options.pop("plants", ()), strategy="ddp", devices=2, **options)
    with contextlib.suppress(RuntimeError):
        fit(folder / "fails", failing(2), data=Rows(2), strategy="ddp", devices=2, log_every_n_steps=50)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    processes.run(in_two_processes, folder)
    return folder


@pytest.mark.long
def test_rows_are_compared_over_world_sizes_and_windows(clean, two, tmp_path):
    fit(tmp_path, data=Rows(2), accumulate_grad_batches=2)
    for one, other in ((clean, two / "clean"), (clean, tmp_path), (tmp_path, two / "clean"), (two / "windows", clean)):
        found = diff(one, other)
        assert found.first_weights is None
        assert (found.parts["samples"].equal, found.parts["batch"].equal) == (STEPS, STEPS)
        assert sum(found.parts["torch_random"].not_compared.values()) == STEPS
        assert sum(found.parts["weights"].not_compared.values()) == STEPS
    swapped = diff(clean, two / "swap")
    assert swapped.parts["batch"].place == "at step 3"
    text = "\n".join(swapped.lines())
    assert "weights: not compared at 6 steps (processes: 1 and 2)" in text


@pytest.mark.long
def test_the_loss_is_compared_within_the_tolerance_over_world_sizes(clean, two, tmp_path):
    fit(tmp_path, dropout=0)
    fit(tmp_path / "windows", dropout=0, data=Rows(2), accumulate_grad_batches=2)
    windows = compare(read_ledger(tmp_path), read_ledger(tmp_path / "windows"), 1e-5)
    assert windows.parts["loss"].near == STEPS
    near = compare(read_ledger(tmp_path), read_ledger(two / "no dropout"), 1e-5)
    assert not near.differs
    assert near.parts["loss"].near == STEPS
    lines = list(near.lines())
    assert "loss: within 1e-05 at 6 steps" in lines
    assert lines[-1] == "ledger diff: no difference in what was compared"
    assert diff(clean, two / "clean").parts["loss"].differs == 0  # dropout draws another mask on each rank


@pytest.mark.long
def test_a_fault_of_one_process_is_named_with_its_rank(two):
    assert not diff(two / "clean", two / "again").differs
    bit = diff(two / "clean", two / "bit")
    assert bit.first() == (2, ["weights"])
    assert bit.parts["weights"].place == "at step 2 (rank 1)"
    line = "the ranks hold different weights from step 2 on: rank 1 differs from the others"
    assert problems(two / "bit") in ([line], [line.replace("rank 1", "rank 0")])  # of two, either may be right
    seed = diff(two / "clean", two / "seed")
    assert seed.parts["torch_random"].place == "at step 1 (rank 1)"
    assert problems(two / "clean") == []


@pytest.mark.long
def test_after_a_failure_the_last_lines_hold_rank_0_alone(two):
    clean, failed = read_ledger(two / "clean").steps, read_ledger(two / "fails").steps
    assert list(failed) == [0, 1]
    for step in failed:
        assert failed[step]["loss"] is failed[step]["batch"] is None
        assert failed[step]["samples"] == clean[step]["samples"]
    assert not diff(two / "clean", two / "fails").differs


def test_a_part_of_the_weights_is_summed_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "LEAST", 50)
    monkeypatch.setattr(sums, "PER_TENSOR", 0)
    found = {}
    for cover in (100, 1):
        for name, plants in (("clean", []), ("bit", [On(on_train_batch_end=flip_unused)])):
            folder = tmp_path / f"{name} {cover}"
            fit(folder, *plants, ledger=RunLedger(str(folder / "ledger.jsonl"), cover))
        found[cover] = diff(tmp_path / f"clean {cover}", tmp_path / f"bit {cover}")
    assert read_ledger(tmp_path / "clean 100").starts[0]["parts"] == 2
    assert found[100].first() == (2, ["weights"])  # step 1 summed the other part
    assert found[1].first() == (1, ["weights"])
    other = diff(tmp_path / "clean 100", tmp_path / "clean 1").parts["weights"]
    assert other.not_compared == {"parts: 2 and 1": STEPS}


def flip_unused(trainer, pl_module, *_):
    if trainer.global_step == 2:
        flip_a_bit(pl_module.unused, random.Random(0))


@pytest.mark.long
def test_a_line_holds_what_ranks_share_once(clean, two):
    for folder in (clean, two / "clean"):
        line = read_ledger(folder).steps[1]
        assert isinstance(line["weights"], str)
        assert json.loads(json.dumps(line["samples"])) == [[ROWS, 2 * ROWS - 1]]
    assert isinstance(read_ledger(two / "clean").steps[1]["loss"], float)  # one, although dropout differs by rank
