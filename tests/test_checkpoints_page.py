"""The tables in docs/checkpoints.md are those of the committed measurement, and bear out what the page says."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import checkpoints

ROOT = Path(__file__).resolve().parent.parent
FILL = runpy.run_path(str(ROOT / "docs/fill_checkpoints.py"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("checkpoints-*-cpu.json"))


@pytest.fixture(scope="module")
def newest():
    return json.loads(RESULTS[-1].read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_newest_measurement(newest):
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    assert FILL["fill"](page, newest) == page
    assert FILL["fill"](page.replace("<!-- checkpoints -->\n", "<!-- checkpoints -->\nspoilt\n"), newest) == page


def test_a_save_takes_the_time_of_torchs_and_no_memory(newest):
    saves = newest["save_memory"]
    assert saves["ours"]["cpu_ratio"] < 1.25
    assert saves["ours"]["cpu_ratio"] < saves["lightning"]["cpu_ratio"]
    assert saves["ours"]["memory"] < 0.1 * newest["gib"]


def test_the_benchmark_runs(tmp_path, capsys):
    options = ["--parameters", "2e6", "--rounds", "1", "--folder", str(tmp_path), "--memory_folder", str(tmp_path)]
    checkpoints.main([*options, "--out", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["parameters"] == 2 * 1024**2
    assert checkpoints.table(result) in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"out.json"}


def test_ratios_are_taken_within_a_round():
    found = {
        "a": [{"seconds": seconds, "cpu": 1.0, "stall": 1.0, "memory": 0.0} for seconds in (1.0, 10.0)],
        "b": [{"seconds": seconds, "cpu": 2.0, "stall": 1.0, "memory": seconds} for seconds in (2.0, 20.0)],
    }
    row = checkpoints.summary(found, "a")["b"]
    assert (row["seconds_ratio"], row["cpu_ratio"], row["seconds"], row["memory"]) == (2.0, 2.0, 11.0, 11.0)
