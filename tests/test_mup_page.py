"""The table in docs/mup.md is that of the committed measurement, and bears out what the page says."""

import itertools
import json
import runpy
from pathlib import Path

import pytest

from benchmarks import mup_transfer

ROOT = Path(__file__).resolve().parent.parent
PLOT = runpy.run_path(str(ROOT / "docs/plot_mup.py"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("mup-transfer-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_newest_measurement(newest):
    page = (ROOT / "docs/mup.md").read_text(encoding="utf-8")
    assert PLOT["fill"](page, newest) == page
    assert PLOT["fill"](page.replace("<!-- transfer -->\n", "<!-- transfer -->\nspoilt\n"), newest) == page


def test_the_best_learning_rate_moves_by_at_most_one_step_with_mup(newest):
    runs, widths = newest["runs"], mup_transfer.WIDTHS
    for width, mup in itertools.product(widths, (True, False)):  # each best one lies between two that are worse
        lr, _ = mup_transfer.best(runs, width, mup)
        done = {run["lr"] for run in runs if run["width"] == width and run["mup"] in (mup, width == widths[0])}
        assert {lr / 2, lr, lr * 2} <= done
    assert abs(mup_transfer.shift(runs, widths, with_mup=True)) <= 1
    assert abs(mup_transfer.shift(runs, widths, with_mup=True)) < abs(mup_transfer.shift(runs, widths, with_mup=False))
    assert mup_transfer.best(runs, max(widths), True)[1] <= mup_transfer.best(runs, max(widths), False)[1] + 0.02


def test_best_and_shift_by_hand():
    def run(width, mup, lr, loss):
        return {"width": width, "mup": mup, "lr": lr, "val_loss": loss}

    runs = [run(128, True, 0.01, 3.0), run(128, True, 0.02, 2.0), run(512, True, 0.02, 1.0), run(512, True, 0.01, None),
            run(512, False, 0.01, 2.5), run(512, False, 0.005, 2.0)]  # fmt: skip
    assert mup_transfer.best(runs, 128, False) == (0.02, 2.0)
    assert mup_transfer.shift(runs, (128, 512), True) == 0.0
    assert mup_transfer.shift(runs, (128, 512), False) == pytest.approx(-2.0)


def test_at_the_base_width_a_learning_rate_runs_once():
    assert mup_transfer.planned((128, 256), (0.1,), 1) == [
        (128, 0.1, True, 0),
        (256, 0.1, True, 0),
        (256, 0.1, False, 0),
    ]


@pytest.mark.slow
def test_a_short_run_writes_what_the_page_needs(tmp_path, text_file, monkeypatch, capsys):
    real = mup_transfer.TextData
    monkeypatch.setattr(mup_transfer, "TextData", lambda **options: real(
        [text_file], cache_dir=str(tmp_path), val_fraction=0.5, **{**options, "vocab_size": 300}))  # fmt: skip
    out = tmp_path / "mup.json"
    mup_transfer.main(["--steps", "2", "--widths", "128", "64", "--lrs", "0.001", "--out", str(out)])
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert [(run["width"], run["mup"]) for run in runs] == [(128, True), (64, True), (64, False)]
    assert all(0 < run["val_loss"] < 7 for run in runs)
    assert capsys.readouterr().out.count("the best learning rate moves by +0 steps") == 2
