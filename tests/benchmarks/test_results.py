"""The committed measurements bear out what the pages say of them."""

import itertools
import json

import pytest
from fill import newest as newest_file
from fill import result_of
from fill_optimizers import misses
from fill_precision import TITLES

from benchmarks import foreign, lightning_suite, mup_transfer, precision, strategies
from benchmarks.foreign_models import MODELS
from benchmarks.formats import formats
from benchmarks.ladder_laws import FEW
from benchmarks.optimizer_rows import ROWS as OPTIMIZERS
from benchmarks.strategy_rows import BATCH, LENGTH, ROWS, TRIALS

pytestmark = pytest.mark.pages


def test_a_save_takes_the_time_of_torchs_and_no_memory():
    newest = result_of("checkpoints")
    saves = newest["save_memory"]
    assert saves["ours"]["cpu_ratio"] < 1.25
    assert saves["ours"]["cpu_ratio"] < saves["lightning"]["cpu_ratio"]
    assert saves["ours"]["memory"] < 0.1 * newest["gib"]


def test_attention_by_documents_is_exact_and_saves_time_where_the_decoder_takes_it():
    cases = {tuple(each["case"][:3]): each["fp32"] for each in result_of("packed-documents")["cases"]}
    assert cases[2, 2048, 8]["by documents"]["median"] < 0.3
    for case in cases.values():
        assert case["error"] < 1e-6
        assert not case["taken"] or case["by documents"]["max"] < 0.7


def test_every_foreign_model_was_tried_and_none_failed():
    rows = result_of("foreign")["rows"]
    assert [row["model"] for row in rows] == list(MODELS)
    for row in rows:
        assert row["norm"] <= foreign.BOUNDS["norm"], row["model"]
        assert "failed" not in row, row["model"]
        assert not str(row["fsdp2"]).startswith("failed"), row["model"]


def test_each_difference_of_lightnings_tests_has_a_reason_and_monitors_make_none():
    modes = result_of("lightning-suite")["modes"]
    known = {why for *_, why in lightning_suite.REASONS}
    found = [row for mode in modes.values() for row in mode["differences"]]
    assert [row for row in found if row["reason"] not in known or row["kind"] == "crashed"] == []
    assert modes["monitors"]["ends"] == modes["monitors"]["equal"] > 300


def test_with_mup_the_best_learning_rate_moves_by_at_most_one_step():
    runs, widths = result_of("mup-transfer")["runs"], mup_transfer.WIDTHS
    for width, mup in itertools.product(widths, (True, False)):  # each best one lies between two that are worse
        lr, _ = mup_transfer.best(runs, width, mup)
        done = {run["lr"] for run in runs if run["width"] == width and run["mup"] in (mup, width == widths[0])}
        assert {lr / 2, lr, lr * 2} <= done
    assert abs(mup_transfer.shift(runs, widths, with_mup=True)) <= 1
    assert abs(mup_transfer.shift(runs, widths, with_mup=True)) < abs(mup_transfer.shift(runs, widths, with_mup=False))
    assert mup_transfer.best(runs, max(widths), True)[1] <= mup_transfer.best(runs, max(widths), False)[1] + 0.02


def test_every_optimizer_was_tried_and_works_or_is_refused_where_it_would_not():
    newest = result_of("optimizers")
    assert sorted([*newest["rows"], *newest["left_out"]]) == sorted(OPTIMIZERS)
    for name, row in newest["rows"].items():
        (*others, last) = ["", *misses(row)]
        assert not any(others), name
        not_bitwise = name in ("SophiaH", "SOAP (heavyball)")  # the page says why
        assert not last or (not_bitwise and last.startswith("resume: differs by ")), last
        assert row["optimizer"] == OPTIMIZERS[name].optimizer


def test_the_state_has_the_bytes_that_follow_from_the_algorithms():
    rows = result_of("optimizers")["rows"]
    held = {name: row.get("costs", {}).get("state_bytes_per_parameter") for name, row in rows.items()}
    assert held["AdamW"] == pytest.approx(8, rel=1e-3)
    assert held["SGD"] == held["Lion"] == pytest.approx(4, rel=1e-3)
    assert held["Adafactor"] < 0.1
    assert held["MuonAdamW"] == pytest.approx(4, rel=0.05)  # and 8 for embedding and head, 4 % of the parameters


def test_every_format_was_measured_and_keeps_what_is_promised_of_it():
    at = {(run["format"], run["lr"], run["steps"]): run for run in result_of("precision")["runs"]}
    measured = [name for name in formats(True) if name != "fp8_delayed"]  # which another file has, over fewer steps
    assert at.keys() >= set(precision.planned(measured, "cpu", 1000, only_peak_lr=False))
    assert set(TITLES) == set(measured)
    peak, fp32 = precision.PEAK_LR, at["fp32", precision.PEAK_LR, 1000]["bits_per_byte"]
    assert at["bf16_mixed", peak, 1000]["bits_per_byte"] == pytest.approx(fp32, rel=0.005)
    assert at["fp8_tensorwise", peak, 1000]["bits_per_byte"] == pytest.approx(fp32, rel=0.01)
    names = ("fp32", "bf16_true_naive", "bf16_true_stochastic")
    fp32, naive, stochastic = (at[name, precision.SMALL_LR, 1000] for name in names)
    assert naive["frozen_share"] > 0.5
    assert naive["bits_per_byte"] > 1.1 * fp32["bits_per_byte"]
    assert stochastic["frozen_share"] < 0.05
    assert stochastic["bits_per_byte"] == pytest.approx(fp32["bits_per_byte"], rel=0.005)


def test_every_strategy_was_measured_and_keeps_what_is_promised():
    results = result_of("strategies"), result_of("stages")  # the second one of stages and experts
    assert {row["row"] for newest in results for row in newest["rows"]} == set(ROWS)
    for newest in results:
        assert not newest["left_out"]
        assert newest["steps"] == 10
        for row in newest["rows"]:
            assert strategies.misses(row) == [], row["row"]
        assert row["processes"] == ROWS[row["row"]].processes
        assert row["resume"]["tensors"] > 0


def test_sharding_shows_in_the_bytes_of_a_process():
    newest = result_of("strategies")
    held = {row["row"]: row["bytes"] for row in newest["rows"]}
    one = held["one"]
    assert one["weights"] == one["gradients"] == 4 * newest["parameters"]
    assert one["optimizer"] == pytest.approx(2 * one["weights"], rel=1e-3)  # and a step count for each tensor
    for name in ("fsdp2", "fsdp2_compiled", "hsdp"):
        for part in ("weights", "gradients", "optimizer", "total"):
            assert held[name][part] == pytest.approx(one[part] / 2, rel=0.01), (name, part)
    assert held["ddp"]["total"] == pytest.approx(20 / 16 * one["total"], rel=0.01)
    for stage in (1, 2):  # weights 4 + optimizer state 4 + gradients 2 + a copy of half the weights 2
        assert held[f"zero{stage}"]["total"] == pytest.approx(12 / 16 * one["total"], rel=0.01)
    assert held["zero3"]["total"] == pytest.approx(10 / 16 * one["total"], rel=0.04)  # vectors whole


def test_what_the_series_of_one_process_show_is_training():
    one = result_of("strategies")["rows"][0]["trials"]
    assert one["adamw"]["series"]["loss"][-1] < 0.5 * one["adamw"]["series"]["loss"][0]
    assert one["adamw"]["series"]["tokens"] == [BATCH * LENGTH] * 9  # the first step has no rate
    for trial, figures in one.items():
        assert min(figures["series"]["norm"]) > TRIALS[trial].clip


def test_each_planted_fault_is_found_first_and_no_healthy_run_has_a_finding():
    result = result_of("doctor-trials")
    assert len(result["faults"]) >= 10
    assert len(result["healthy"]) >= 12
    assert [row["name"] for row in (*result["faults"], *result["healthy"]) if not row["right"]] == []


def test_compare_sees_a_learning_rate_three_times_as_high_and_rarely_a_difference_where_there_is_none():
    result = result_of("compare-trials")
    lines = {row["case"]: row["lines"][0] for row in result["cases"]}
    assert lines["two seeds of one recipe"].startswith("no difference that these seeds can show")
    assert lines["lr 0.001 and x 3, three seeds each"].startswith("B is better than A: val/loss 4.")
    assert lines["lr 0.001 and x 3, one run each"].endswith("(one seed each: no statement of significance)")
    for row in result["false_positives"]:
        assert row["shown"] <= 0.05 * row["ways"]


def test_intervals_of_forecasts_from_ladders_hold_the_loss_and_sound_ladders_are_rarely_refused():
    result = json.loads(newest_file("ladder-laws").read_text(encoding="utf-8"))
    rows = {(row["ladder"], row["distance"]): row for row in result["forecasts"]}
    assert all(rows["the law holds", distance]["refused"] <= 0.15 for distance in (4, 10))
    for key, row in rows.items():  # seeds of real runs made half of such a noise or less
        assert row["answered"] < FEW or row["coverage"] >= 0.88 or key == ("noise of 1 %", 4), key
    for row in result["speedups"]:  # of equal recipes the ones not refused are those that seeds have made different
        assert row["coverage" if row["difference"] else "coverage_with_refused"] >= 0.88, row
