"""Each script runs, on little, and writes what its page needs; its arithmetic is that worked out by hand."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures
from fill import result_of
from fill_optimizers import misses

from benchmarks import (
    checkpoints,
    compare_trials,
    doctor_trials,
    foreign,
    machine,
    mup_transfer,
    plan_foreign,
    plan_published,
    precision,
)
from lightning_tricks.logs.compare.compared_run import read_runs


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_checkpoints(tmp_path, capsys):
    options = ["--parameters", "2e6", "--rounds", "1", "--folder", str(tmp_path), "--memory_folder", str(tmp_path)]
    checkpoints.main([*options, "--out", str(tmp_path / "out.json")])
    result = read(tmp_path / "out.json")
    assert result["parameters"] == 2 * 1024**2
    assert checkpoints.table(result) in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"out.json"}


def test_doctor_trials(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"the number {i} is {i * i}\n" for i in range(5000)))
    pinned, plain = doctor_trials.FAULTS[1], doctor_trials.healthy()[0]
    rows = {}
    for trial in (pinned, plain):
        short = dataclasses.replace(trial, steps=60)
        rows[trial.name] = doctor_trials.judge(short, tmp_path / trial.name.replace(" ", "_"), tmp_path / "text.txt")
    assert rows["clip"]["right"]
    assert rows["clip"]["monitor"] == ["clip_pinned"]
    assert rows["clip"]["steps"] == rows["healthy 0"]["steps"] == 60
    texts = doctor_trials.tables({"faults": [rows["clip"]], "healthy": [rows["healthy 0"]]})
    assert "| clip at 0.001 | `clip_pinned` (warning) | established |" in texts["faults"]
    assert "| AdamW, cosine | 1 |" in texts["healthy"]


def test_compare_trials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"the number {i} is {i * i}\n" for i in range(5000)))
    runs = [("base", 0), ("base", 1), ("lr3", 0)]
    for kind, seed in runs:
        compare_trials.train(Path("runs"), Path("text.txt"), kind, seed, steps=3)
    rows = compare_trials.judge(Path("runs"), {"seeds": (runs[:2], {}), "one and two": (runs, {})})
    assert rows[0]["lines"][0].startswith(
        "no difference that these seeds can show: the 2 runs differ only in their seed"
    )
    assert [len(row["row"]["groups"]) for row in rows] == [1, 2]
    found, _ = read_runs([f"runs/base/seed_{seed}" for seed in (0, 1)], {})
    counts = compare_trials.false_positives(found, 1)
    assert counts == {"seeds": 1, "ways": 1, "shown": 0}
    result = {"cases": rows, "false_positives": [counts], "machine": machine.describe()}
    assert "| seeds | no difference that these seeds can show" in compare_trials.table(result)


def test_ratios_are_taken_within_a_round():
    found = {
        "a": [{"seconds": seconds, "cpu": 1.0, "stall": 1.0, "memory": 0.0} for seconds in (1.0, 10.0)],
        "b": [{"seconds": seconds, "cpu": 2.0, "stall": 1.0, "memory": seconds} for seconds in (2.0, 20.0)],
    }
    row = checkpoints.summary(found, "a")["b"]
    assert (row["seconds_ratio"], row["cpu_ratio"], row["seconds"], row["memory"]) == (2.0, 2.0, 11.0, 11.0)


def test_verdicts_on_foreign_models():
    assert foreign.verdict(1e-7, 1e-6) == "equal"
    assert foreign.verdict(float("nan"), 1e-6) == "differs by nan"
    assert foreign.verdict(2e-5, 1e-6) == "differs by 2e-05"
    assert foreign.verdict("refused: a line", 1e-6) == "refused: a line"


def test_plans_of_foreign_modules(tmp_path, capsys):
    out = tmp_path / "out.json"
    names = ["torch recommender", "GAN, manual optimization"]
    assert plan_foreign.main([*names, "--out", str(out)]) == 0
    assert "2 of 2: a figure within 15%, or a line" in capsys.readouterr().out
    result = read(out)
    assert [row["model"] for row in result["rows"]] == names
    recommender = result["rows"][0]
    assert recommender["measured"]["gradients"] == 4 * (50_000 * 64 + 77 * 256 + 256 + 256 + 1)
    assert "GAN optimizes manually" in plan_foreign.page_text(result)
    recommender["relative_error"]["largest instant"] = -0.2
    assert not plan_foreign.is_as_promised(recommender)
    with pytest.raises(SystemExit):
        plan_foreign.main(["a model"])
    assert "unknown model a model: give some of" in capsys.readouterr().err


def test_published_rows_by_hand():
    row = plan_published.ROWS[0]
    assert plan_published.logits_gib(row) == pytest.approx(2 * 8192 * 128256 * 12 / 2**30)
    sizes = plan_published.ROWS[6]
    assert plan_published.logits_gib(sizes) == pytest.approx(16 / 8 * 8192 * 128256 * 12 / 2**30)
    result = result_of("plan-published")
    assert len(result["memory"]) == sum(row.gib is not None for row in plan_published.ROWS)
    for one in result["memory"]:
        assert one["error"] == pytest.approx(one["plan_gib"] / one["published_gib"] - 1)


def test_best_and_shift_under_mup():
    def run(width, mup, lr, loss):
        return {"width": width, "mup": mup, "lr": lr, "val_loss": loss}

    runs = [run(128, True, 0.01, 3.0), run(128, True, 0.02, 2.0), run(512, True, 0.02, 1.0), run(512, True, 0.01, None),
            run(512, False, 0.01, 2.5), run(512, False, 0.005, 2.0)]  # fmt: skip
    assert mup_transfer.best(runs, 128, False) == (0.02, 2.0)
    assert mup_transfer.shift(runs, (128, 512), True) == 0.0
    assert mup_transfer.shift(runs, (128, 512), False) == pytest.approx(-2.0)


def test_mup_transfer(tmp_path, text_file, monkeypatch, capsys):
    real = mup_transfer.TextData
    monkeypatch.setattr(mup_transfer, "TextData", lambda **options: real(
        [text_file], cache_dir=str(tmp_path), val_fraction=0.5, **{**options, "vocab_size": 300}))  # fmt: skip
    out = tmp_path / "mup.json"
    mup_transfer.main(["--steps", "2", "--widths", "128", "64", "--lrs", "0.001", "--out", str(out)])
    runs = read(out)["runs"]
    assert [(run["width"], run["mup"]) for run in runs] == [(128, True), (64, True), (64, False)]  # at 128 once
    assert all(0 < run["val_loss"] < 7 for run in runs)
    assert capsys.readouterr().out.count("the best learning rate moves by +0 steps") == 2


SPOILT = {
    "differs in shards": lambda row: row["tried"]["said"]["fsdp2"]["loss"].__setitem__(5, 9.0),
    "fails": lambda row: row["tried"]["said"].update(bf16_true={"failed": "RuntimeError: no"}),
    "grows": lambda row: row["tried"]["said"]["bf16_true"].update(grows=True),
    "another compiled step": lambda row: row["tried"]["said"]["compile"].update(gap=0.1),
    "resume in shards": lambda row: row["tried"]["said"]["fsdp2"].update(resume="failed: KeyError"),
    "resume": lambda row: row["tried"]["said"]["one"].update(resume="failed: KeyError"),
    "learns nothing": lambda row: row["learns"].update(last_loss=9.0),
    "refused though it works": lambda row: row["tried"].update(
        said={**row["tried"]["said"], "fsdp2": {"refused": "no"}}, tried={"fsdp2": row["tried"]["said"]["fsdp2"]}
    ),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_optimizer_that_breaks_one_promise_is_told(spoil):
    row = copy.deepcopy(result_of("optimizers")["rows"]["AdamW"])
    SPOILT[spoil](row)
    assert len(misses(row)) == 1


def test_frozen_counts_weights_that_ended_where_they_began():
    module, frozen = torch.nn.Linear(4, 2), precision.Frozen()
    frozen.on_train_start(None, module)
    with torch.no_grad():
        module.weight[0, :3] += 1.0
        module.bias += 1.0  # is no matrix
    frozen.on_train_end(None, module)
    assert frozen.share == 5 / 8


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_precision_goes_on_where_it_stopped(tmp_path, text_file, capsys, monkeypatch):
    decoder = precision.MODEL["model.init_args.decoder.init_args"]
    smaller = {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "d_ff": 64}
    monkeypatch.setitem(precision.MODEL, "model.init_args.decoder.init_args", {**decoder, **smaller})
    monkeypatch.setitem(precision.MODEL, "data.init_args.seq_len", 32)
    monkeypatch.setitem(precision.MODEL, "data.init_args.files", text_file)
    monkeypatch.setitem(precision.MODEL, "trainer.gradient_clip_val", 0.1)  # its gradients are as small
    out = tmp_path / "precision.json"
    options = ["--steps", "20", "--device", "cpu", "--out", str(out)]
    precision.main(["bf16_true_naive", *options, "--only_peak_lr"])
    precision.main(["bf16_true_naive", *options])
    runs = read(out)["runs"]
    assert [(run["format"], run["lr"]) for run in runs] == [("bf16_true_naive", 2e-3), ("bf16_true_naive", 3e-5)]
    assert all(run["steps"] == len(run["loss"]) == 20 and run["clipped_share"] > 0 for run in runs)
    assert runs[0]["bits_per_byte"] < runs[1]["bits_per_byte"] < 1024 / math.log(2)
    assert capsys.readouterr().out.count("bits/byte") == 2
    with pytest.raises(SystemExit):
        precision.main(["bf15"])
    assert "unknown format bf15: give some of fp32" in capsys.readouterr().err
