"""The race: what its tables say of runs, which runs are planned, and one run of it."""

import fcntl
import json
import math
import os
import re

import pytest

from benchmarks import race, race_table
from benchmarks.race_arms import ARMS, FINALS, SCREENED, TUNED, Arm

pytestmark = pytest.mark.pages


def ran(stage, arm, seed, half, end, steps=600):
    return {"stage": stage, "arm": arm, "seed": seed, "steps": steps, "bits_per_byte": [half, end], "seconds": 60.0}


# AdamW halves its loss in four times the steps; Muon ends a tenth below it, a run without warmup a tenth above
RUNS = [
    *(ran("screen", "adamw", seed, 3.0, 2.0) for seed in (1, 2)),
    *(ran("finals", "adamw", seed, 2.0, 1.0, 2400) for seed in (11, 12)),
    *(ran("finals", "muon", seed, 2.0, 0.9, 1200) for seed in (11, 12)),
    ran("screen", "muon", 1, 2.9, 2.0 * 0.9 * math.exp(0.01), 400),
    ran("screen", "muon", 2, 2.9, 2.0 * 0.9 * math.exp(-0.01), 400),
    *(ran("screen", "warmup", seed, 2.9, 2.2) for seed in (1, 2)),
    ran("tune", "adamw_lr_0.002", 0, 3.0, 2.0),
    ran("tune", "adamw_lr_0.004", 0, 3.0, 2.2),
]


def cells(table, name):
    return [cell.strip() for cell in re.search(rf"^\| `{name}` .*$", table, re.M)[0].strip("|").split("|")]


def test_a_trick_is_worth_the_mean_of_its_pairs_with_the_spread_of_all():
    table = race_table.tricks_table(RUNS)
    # the spread: sqrt(0.02**2 / 2 / 2) over two arms, with two degrees of freedom; t is 2.92
    half = 100 * 2.92 * math.sqrt(0.02**2 / 2 / 2) / math.sqrt(2)
    assert cells(table, "muon")[3] == f"-10.0 % ± {half:.1f}"
    # the loss falls by ln 2 in ln 4 of steps, so that a tenth is worth 0.9**2 of the time
    assert cells(table, "muon")[4:] == ["0.81", "yes"]
    assert cells(table, "warmup")[3:] == [f"-9.1 % ± {half:.1f}", "0.83", "yes"], "what its lack costs"
    assert cells(table, "qk_norm")[3] == "not run"
    one_seed = race_table.tricks_table([*RUNS, ran("screen", "cosine", 1, 3.0, 2.2)])
    assert cells(one_seed, "cosine")[3] == f"+10.0 % ± {half * math.sqrt(2):.1f}, one seed"
    assert [line.split("`")[1] for line in table.splitlines()[2:4]] == ["muon", "warmup"], "the best first"


def test_the_finals_and_the_claims_come_from_the_runs():
    copied = [run | {"copied_nats": 2.5} if run["seed"] == 12 else run for run in RUNS]
    assert cells(race_table.finals_table(copied), "muon")[2:] == [
        "0.9000", "-10.0 % ± 0.0", "0.900, 0.900", "1200", "1.0", "?, 2.5"
    ]  # fmt: skip
    assert cells(race_table.finals_table(RUNS), "stock")[2] == "not run"
    claims = race_table.claims_table(RUNS)
    assert "0.54 of its steps, 0.81 of its time at 600 steps; 0.41 of its steps, 0.81 of its time" in claims
    assert "0% of pairs of tricks change places; 1 of 2 cross their base" in claims
    assert "depth | not run |" in claims
    depth = [ran("depth", name, 1, 3.0, end) for name, end in (("adamw_8_layers", 2.0), ("muon_8_layers", 1.9))]
    assert "one seed: -5.0 % with 8 layers |" in race_table.claims_table([*RUNS, *depth])
    assert "| `adamw_lr_0.004` | lr 0.004 | 2.2000 |" in race_table.tuning_table(RUNS)


def test_a_trick_that_the_base_has_is_ranked_by_what_its_lack_costs():
    runs = [ran("screen", "adamw", 1, 3.0, 2.0), ran("screen", "cosine", 1, 2.9, 1.8), *RUNS[-2:]]
    claims = race_table.claims_table([*runs, ran("screen", "warmup", 1, 3.2, 2.1), *RUNS[2:4]])
    assert "100% of pairs of tricks change places; 0 of 2 cross their base" in claims
    claims = race_table.claims_table([*runs, ran("screen", "warmup", 1, 3.2, 2.5), *RUNS[2:4]])
    assert "the best trick, `warmup`, is worth -20.0 %" in claims


def test_finals_of_several_lengths_and_bases_are_told(monkeypatch):
    monkeypatch.setitem(FINALS, "stack", FINALS["muon"]._replace(base="muon"))
    stack = [ran("finals", "stack", seed, 2.0, end, steps) for seed, end, steps in ((11, 0.8, 1100), (12, 0.9, 1090))]
    found = cells(race_table.finals_table([*RUNS, *stack]), "stack")
    # against AdamW the spread is that of ln 0.8 and ln 0.9, over two arms; t is 2.92
    half = 100 * 2.92 * math.log(0.9 / 0.8) / 2 / math.sqrt(2)
    assert found[3:6] == [f"-15.1 % ± {half:.1f}", "0.800, 0.900", "1090, 1100"]


def test_an_arm_runs_beside_its_base_on_the_seeds_of_its_stage():
    assert list(race.planned("screen", ["polar_express"])) == [
        (name, seed, 600) for seed in (1, 2) for name in ("adamw", "muon", "polar_express")
    ]
    assert [run[1] for run in race.planned("finals", ["adamw"])] == [11, 12, 13]
    assert list(race.planned("depth", ["muon_8_layers"])) == [("muon_8_layers", 1, 300)]
    assert list(race.planned("tune", ["muon_lr_0.01_0.008"])) == [("muon_lr_0.01_0.008", 0, 600)]
    assert all(arm.base in FINALS for arm in {**SCREENED, **TUNED}.values())


def test_processes_with_other_temporary_folders_wait_for_each_other(tmp_path, monkeypatch):
    out, waits = tmp_path / "race.json", []

    def write(path, result):
        other = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits.append(result["runs"])
        os.close(other)

    monkeypatch.setattr(race, "write", write)
    race.append(out, {"arm": "adamw"})
    assert waits == [[{"arm": "adamw"}]]


def test_a_run_is_written_and_not_run_again(tmp_path, text_file, monkeypatch, capsys):
    options = {"data.files": text_file, "data.vocab_size": 300, "data.seq_len": 32, "data.cache_dir": str(tmp_path)}
    small = Arm("muon", "small", None, {**options, "model.decoder.d_model": 16, "trainer.limit_val_batches": 1})
    monkeypatch.setitem(ARMS, "adamw", small)
    monkeypatch.setattr(race, "SCREEN", 4)
    out = tmp_path / "race.json"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["race", "adamw", "--out", str(out)])
        race.main()
    runs = json.loads(out.read_text())["runs"]
    assert all(abs(run["copied_nats"]) < 0.5 for run in runs), "nothing is copied after four steps"
    assert [(run["arm"], run["seed"], run["at_steps"]) for run in runs] == [("adamw", 1, [2, 4]), ("adamw", 2, [2, 4])]
    assert capsys.readouterr().out.count("adamw") == 2
