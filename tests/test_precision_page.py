"""The tables of docs/precision.md are those of the committed measurement, and the script that measures works."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from benchmarks import precision
from benchmarks.formats import formats

ROOT = Path(__file__).resolve().parent.parent
PAGE = runpy.run_path(str(ROOT / "docs/plot_precision.py"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("precision-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_newest_measurement(newest):
    page = (ROOT / "docs/precision.md").read_text(encoding="utf-8")
    assert PAGE["fill"](page, newest) == page
    assert RESULTS[-1].name in page
    assert PAGE["fill"](page.replace("| 1.", "| 9.", 1), newest) == page, "the tables are not filled at all"


def test_every_format_was_measured_and_keeps_what_is_promised_of_it(newest):
    at = {(run["format"], run["lr"], run["steps"]): run for run in newest["runs"]}
    assert at.keys() == set(precision.planned(list(formats(True)), "cpu", 1000, only_peak_lr=False))
    assert set(PAGE["TITLES"]) == set(formats(True))
    peak, fp32 = precision.PEAK_LR, at["fp32", precision.PEAK_LR, 1000]["bits_per_byte"]
    assert at["bf16_mixed", peak, 1000]["bits_per_byte"] == pytest.approx(fp32, rel=0.005)
    assert at["fp8_tensorwise", peak, 1000]["bits_per_byte"] == pytest.approx(fp32, rel=0.01)
    names = ("fp32", "bf16_true_naive", "bf16_true_stochastic")
    fp32, naive, stochastic = (at[name, precision.SMALL_LR, 1000] for name in names)
    assert naive["frozen_share"] > 0.5
    assert naive["bits_per_byte"] > 1.1 * fp32["bits_per_byte"]
    assert stochastic["frozen_share"] < 0.05
    assert stochastic["bits_per_byte"] == pytest.approx(fp32["bits_per_byte"], rel=0.005)


def test_frozen_counts_weights_that_ended_where_they_began():
    module, frozen = torch.nn.Linear(4, 2), precision.Frozen()
    frozen.on_train_start(None, module)
    with torch.no_grad():
        module.weight[0, :3] += 1.0
        module.bias += 1.0  # is no matrix
    frozen.on_train_end(None, module)
    assert frozen.share == 5 / 8


@pytest.mark.slow
def test_a_short_run_writes_what_the_page_needs_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    decoder = precision.MODEL["model.init_args.decoder.init_args"]
    smaller = {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "d_ff": 64}
    monkeypatch.setitem(precision.MODEL, "model.init_args.decoder.init_args", {**decoder, **smaller})
    monkeypatch.setitem(precision.MODEL, "data.init_args.seq_len", 32)
    monkeypatch.setitem(precision.MODEL, "trainer.gradient_clip_val", 0.1)  # its gradients are as small
    out = tmp_path / "precision.json"
    options = ["--steps", "20", "--device", "cpu", "--out", str(out)]
    precision.main(["bf16_true_naive", *options, "--only_peak_lr"])
    precision.main(["bf16_true_naive", *options])
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert [(run["format"], run["lr"]) for run in runs] == [("bf16_true_naive", 2e-3), ("bf16_true_naive", 3e-5)]
    assert all(run["steps"] == len(run["loss"]) == 20 and run["clipped_share"] > 0 for run in runs)
    assert runs[0]["bits_per_byte"] < runs[1]["bits_per_byte"] < 1024 / math.log(2)
    assert capsys.readouterr().out.count("bits/byte") == 2


def test_an_unknown_format_is_refused(capsys):
    with pytest.raises(SystemExit):
        precision.main(["bf15"])
    assert "unknown format bf15: give some of fp32" in capsys.readouterr().err
