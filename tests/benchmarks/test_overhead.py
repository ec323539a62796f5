"""The overhead benchmark's arithmetic by hand, and one short run of it."""

import dataclasses
import json
import logging
import os
import warnings

import pytest


@pytest.fixture(scope="module")
def overhead():
    # importing it hides the GPU, which the tests marked gpu still want
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    from benchmarks import overhead

    if before is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    return overhead


def test_a_window_is_the_mean_of_its_steps_and_a_rest_is_left_out(overhead):
    stamps = [(0.0, 0.0), (1.0, 0.5), (3.0, 1.0), (4.0, 1.5), (7.0, 3.0), (100.0, 50.0)]
    assert overhead.windows(stamps, 2) == ([1.5, 2.0], [0.5, 1.0])


def test_ratios_are_taken_round_by_round(overhead):
    # the third round was slow for both: the ratio of the medians would be 3, too, but with a minimum of 0.5
    assert overhead.ratios([2.0, 3.0, 30.0], [1.0, 1.0, 4.0]) == {
        "median": 3.0, "min": 2.0, "max": 7.5, "rounds": [2.0, 3.0, 7.5],
    }  # fmt: skip


@pytest.fixture
def _warnings_as_before():
    level = logging.getLogger("lightning.pytorch").level
    with warnings.catch_warnings():  # a benchmark ignores all of them
        yield
    logging.getLogger("lightning.pytorch").setLevel(level)


@pytest.mark.usefixtures("_warnings_as_before")
def test_a_short_run_writes_each_contender_with_the_machine_it_ran_on(overhead, tmp_path, monkeypatch, capsys):
    contenders = ("bare", "ours")  # how each of them trains is in test_contenders.py
    micro = dataclasses.replace(overhead.SIZES["micro"], warmup=2, contenders=contenders)
    monkeypatch.setitem(overhead.SIZES, "micro", micro)
    out = tmp_path / "new" / "overhead.json"
    overhead.main(["--sizes", "micro", "--rounds", "1", "--steps", "5", "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert {"date", "cpu", "cores", "versions"} <= result["machine"].keys()
    micro = result["sizes"]["micro"]
    assert tuple(micro["figures"]) == contenders
    for ratio in ("cpu_ratio", "wall_ratio"):
        assert micro["figures"]["bare"][ratio]["rounds"] == [1.0]
    for name, figures in micro["figures"].items():
        assert figures["wall_ms"] >= 0.95 * figures["cpu_ms"] > 0
        assert len(figures["wall_ratio"]["rounds"]) == 1
        assert f"| micro | {name} |" in printed
    assert micro["figures"]["ours"]["cpu_ratio"]["rounds"] != [1.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "huge"], "--sizes huge: give some of micro,micro_log_every_step,tiny,small"),
        (["--rounds", "0"], "give at least 1"),
    ],
)
def test_bad_options_are_refused_in_a_line(overhead, capsys, arguments, says):
    with pytest.raises(SystemExit) as stopped:
        overhead.main(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("_warnings_as_before")
def test_the_cost_of_a_metric_is_measured_for_both_ways_of_logging(overhead, tmp_path, monkeypatch):
    from benchmarks import metric_cost

    for name, steps in (("EVERY", 10), ("WARMUP", 5), ("STEPS", 20)):
        monkeypatch.setattr(metric_cost, name, steps)
    out = tmp_path / "metric_cost.json"
    metric_cost.main(["--rounds", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"date", "cpu", "cores", "versions"} <= result["machine"].keys()
    assert result["self_log_us"] > result["buffer_us"]
    steps = {name: min(seen) for name, seen in result["step_us"].items()}
    for name, cost in (("self.log", result["self_log_us"]), ("buffer", result["buffer_us"])):
        assert cost == pytest.approx((steps[f"{name}, 25"] - steps[f"{name}, 5"]) / 20, abs=0.02)
    assert {"self_log_over_buffer", "buffer_fixed_us"} <= result.keys()
