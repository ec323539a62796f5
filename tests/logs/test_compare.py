"""`compare` says of each difference what its seeds can show: intervals are known ones, and so is what is not known."""

import json
import math
import re
import sys

import pytest
from made_logs import run_in

from lightning_tricks import __main__ as door
from lightning_tricks.commands.compare import axis_shown, draw_in_terminal, page, run_curves, text, verdicts
from lightning_tricks.logs.compared_run import outcome_of, read_runs
from lightning_tricks.logs.comparison import compare_runs
from lightning_tricks.logs.intervals import paired, pooled_spread, student_t, welch, with_spread
from lightning_tricks.logs.page import plot

# ---- made-up runs

ROWS = {"micro_batch_size": 4, "seq_len": 8}  # 32 tokens a step


def made(folder, val=None, train=None, more=None, lr=1e-3, seed=0, data=None, trainer=None, config=True):
    """The folder of a run.

    Args:
        val: validation losses by steps done.
        train: training losses of steps 0, 1, 2, ...
        more: other metrics by name, each by steps done.
        data: settings of the data beside its seed.
    """
    columns = {"val/loss": val or {}, "train/loss": {i + 1: loss for i, loss in enumerate(train or [])}, **(more or {})}
    columns = {name: points for name, points in columns.items() if points}
    rows = [
        ",".join(map(str, [done - 1, *(points.get(done, "") for points in columns.values())]))
        for done in sorted({done for points in columns.values() for done in points})
    ]
    settings = {
        "seed_everything": seed,
        "model": {"class_path": "a.Model", "init_args": {"optimizer": {"init_args": {"lr": lr}}}},
        "data": {"class_path": "D", "init_args": {"seed": seed, **ROWS, **(data or {})}},
        "trainer": {"max_steps": 40, "devices": 1, **(trainer or {})},
    }  # fmt: skip
    return run_in(folder, "\n".join([",".join(["step", *columns]), *rows, ""]), settings if config else None)


def curve(end, steps=40, every=10):
    """Validation losses that fall by a half each time, to an end."""
    return {done: end + 2.0 ** -(done // every) - 2.0 ** -(steps // every) for done in range(every, steps + 1, every)}


def compared(*folders, **options):
    runs, _ = read_runs([str(folder) for folder in folders], options.pop("names", {}))
    return compare_runs(runs, **options)


def seeds_of(folder, kind, ends, **settings):
    """Runs of one recipe that end at these losses, with seeds 0, 1, 2, ..."""
    return [made(folder / kind / f"seed_{seed}", curve(end), seed=seed, **settings) for seed, end in enumerate(ends)]


# ---- statistics


@pytest.mark.parametrize("df", [1, 1.3, 2, 4.5, 30, 1e4])
@pytest.mark.parametrize("probability", [0.5, 0.6, 0.95, 0.975, 0.999])
def test_quantiles_are_those_of_scipy(probability, df):
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    assert student_t(probability, df) == pytest.approx(float(stdtrit(df, probability)), rel=1e-8, abs=1e-12)


def test_a_single_run_is_compared_by_a_noise_that_is_given(tmp_path):
    for kind in "ab":
        seeds_of(tmp_path, kind, [3.0, 3.1], lr={"a": 1e-3, "b": 3e-3}[kind])
    single = compared(tmp_path / "a" / "seed_0", tmp_path / "b" / "seed_1", seed_noise=0.1)
    assert single.verdict(1) == "no difference"


def test_intervals_are_those_of_scipy():
    two = [1.0, 2.0, 3.0], [5.0, 7.0, 9.0]
    apart = welch(*two, 0.95)  # 50/17 degrees of freedom, standard error sqrt(5/3)
    assert (apart.difference, apart.excludes_zero) == (5.0, True)
    assert apart.half_width == pytest.approx(9.155399503182505 - 5.0, rel=1e-8)
    pairs = paired([1.0, 2.0, 3.0], 0.95)
    assert pairs.difference == 2.0
    assert pairs.half_width == pytest.approx(4.302652729749462 / math.sqrt(3), rel=1e-8)
    spread, df = pooled_spread([[1.0, 2.0, 3.0], [5.0, 7.0, 9.0], [4.0]])
    assert (spread, df) == (math.sqrt(2.5), 4)
    interval = with_spread(*two, spread, df, 0.95, "")
    assert interval.half_width == pytest.approx(8.58437521803005 - 5.0, rel=1e-8)  # Student's test of scipy
    assert pooled_spread([[1.0], [2.0]]) is None


# ---- groups


def test_runs_that_differ_in_seeds_alone_are_one_group(tmp_path):
    seeds_of(tmp_path, "a", [3.0, 3.1], trainer={"callbacks": [{"class_path": "Saver", "init_args": {"dirpath": "x"}}]})
    made(
        tmp_path / "b",
        curve(2.0),
        lr=3e-3,
        trainer={"callbacks": [{"class_path": "Saver", "init_args": {"dirpath": "y"}}]},
    )
    found = compared(tmp_path / "a", tmp_path / "b")
    assert [[run.name for run in group.runs] for group in found.groups] == [["a/seed_0", "a/seed_1"], ["b"]]
    assert [group.n_seeds for group in found.groups] == [2, 1]
    assert found.settings()["lr"] == ["0.001", "0.003"]
    assert found.settings()["seed_everything"] == ["0, 1", "0"]
    assert compared(tmp_path / "a").settings()["seed_everything"] == ["0, 1"]
    assert [len(group.runs) for group in compared(tmp_path / "a", tmp_path / "b", by="runs").groups] == [1, 1, 1]


def test_folders_decide_where_nothing_is_on_file(tmp_path):
    for kind in "ab":
        for seed in range(3):
            made(tmp_path / kind / f"version_{seed}", curve(3.0 + seed / 100), config=False)
    alone = compared(tmp_path / "a", tmp_path / "b")
    assert len(alone.groups) == 6
    assert alone.notes[0].startswith("no settings on file for a/version_0, a/version_1, a/version_2, b/version_0 and 2")
    found = compared(tmp_path / "a", tmp_path / "b", by="folders")
    assert [len(group.runs) for group in found.groups] == [3, 3]
    assert found.verdict(1) == "no difference"


def test_a_repeated_seed_is_no_further_seed(tmp_path):
    made(tmp_path / "a", curve(3.0))
    made(tmp_path / "again", curve(3.2))
    made(tmp_path / "b", curve(2.0), lr=3e-3)
    found = compared(tmp_path)
    assert [group.n_seeds for group in found.groups] == [1, 1]
    assert found.row.means == [pytest.approx(3.1), pytest.approx(2.0)]
    assert "1 of A's runs repeats a seed: their mean counts as one seed" in found.notes
    assert found.verdict(1) == "not known"
    (line,) = verdicts(compared(tmp_path / "a", tmp_path / "again"))
    assert line.endswith("the 2 runs have one seed as well: they end 0.2000 apart, which is no seed's doing")


# ---- what may be said


def test_a_better_recipe_is_named_with_its_interval(tmp_path):
    """By hand: differences of -0.2, -0.21 and -0.19, whose standard error is 0.01 / sqrt(3)."""
    seeds_of(tmp_path, "a", [3.00, 3.02, 2.98])
    seeds_of(tmp_path, "b", [2.80, 2.81, 2.79], lr=3e-3)
    found = compared(tmp_path / "a", tmp_path / "b")
    interval = found.row.intervals[1]
    assert list(found.settings()) == ["lr"]  # both have the seeds 0, 1 and 2
    assert found.verdict(1) == "better"
    assert interval.difference == pytest.approx(-0.2)
    assert interval.half_width == pytest.approx(4.302652729749462 * 0.01 / math.sqrt(3))
    assert verdicts(found) == [
        "B is better than A: val/loss 2.8000 against 3.0000 at 40 steps, lower by 0.2000 (95 % interval -0.2248 to "
        "-0.1752, differences of 3 seeds that both have)"
    ]
    assert found.row.spreads == [pytest.approx(0.02), pytest.approx(0.01)]


def test_a_difference_within_the_spread_of_seeds_is_none_that_they_can_show(tmp_path):
    seeds_of(tmp_path, "a", [3.00, 3.20])
    seeds_of(tmp_path, "b", [3.05, 3.10], lr=3e-3)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.verdict(1) == "no difference"
    half = welch([3.0, 3.2], [3.05, 3.1], 0.95).half_width
    assert verdicts(found)[0].startswith("A and B are not distinguishable by these seeds: B - A = -0.0250 at 40 steps")
    assert "Welch's t over 2 and 2 seeds" in verdicts(found)[0]
    assert verdicts(found)[0].endswith(f"only one above {half:.4f} would show")


def test_two_seeds_of_one_recipe_have_no_difference_and_tell_the_spread(tmp_path, capsys):
    seeds_of(tmp_path, "a", [3.0, 3.1])
    door.run(["compare", str(tmp_path / "a")])  # exits with 0
    said = " ".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert said.endswith(
        "compare: no difference that these seeds can show: the 2 runs differ only in their seed. They lie 0.1000 apart "
        "at 40 steps, a standard deviation of 0.0707 (for --seed_noise)"
    )


def test_one_run_takes_the_spread_of_the_others(tmp_path):
    seeds_of(tmp_path, "a", [3.0, 3.1, 3.2])
    seeds_of(tmp_path, "b", [2.0], lr=3e-3)
    found = compared(tmp_path / "a", tmp_path / "b")
    interval = found.row.intervals[1]
    assert interval.half_width == pytest.approx(4.302652729749462 * 0.1 * math.sqrt(1 / 3 + 1))
    assert interval.method == "the spread of A's seeds taken for all"
    assert found.verdict(1) == "better"


def test_two_single_runs_are_described_and_no_more(tmp_path):
    seeds_of(tmp_path, "a", [3.0])
    seeds_of(tmp_path, "b", [2.0], lr=3e-3)
    seeds_of(tmp_path, "a2", [3.0])
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.verdict(1) == "not known"
    assert verdicts(found) == [
        "B is lower than A by 1.0000 at 40 steps, and lower at 4 of 4 points (one seed each: no statement of "
        "significance)"
    ]
    assert "give --seed_noise" in text(found, [])
    swapped, same = compared(tmp_path / "b", tmp_path / "a"), compared(tmp_path / "a", tmp_path / "a2", by="runs")
    assert "B is higher than A by 1.0000 at 40 steps, and higher at 4 of 4 points (" in verdicts(swapped)[0]
    assert "B is equal to A at 40 steps, and equal at 4 of 4 points (" in verdicts(same)[0]
    given = compared(tmp_path / "a", tmp_path / "b", seed_noise=0.1)
    assert given.verdict(1) == "better"
    assert given.row.intervals[1].half_width == pytest.approx(1.959963984540054 * 0.1 * math.sqrt(2), rel=1e-6)
    assert compared(tmp_path / "a", tmp_path / "b", seed_noise=0.6).verdict(1) == "no difference"


def test_intervals_of_several_groups_hold_together(tmp_path):
    a, b, c = [3.0, 3.1], [2.0, 2.3], [2.5, 2.6]
    for kind, ends, lr in (("a", a, 1e-3), ("b", b, 2e-3), ("c", c, 3e-3)):
        seeds_of(tmp_path, kind, ends, lr=lr)
    found = compared(tmp_path)
    assert found.level == pytest.approx(0.975)
    assert found.row.intervals[2].half_width == pytest.approx(welch(a, c, 0.975).half_width)
    assert "over seeds, 97.5 % each, so that all hold together (Bonferroni)" in text(found, [])


def test_a_run_that_failed_is_worse_and_has_no_interval(tmp_path, capsys):
    seeds_of(tmp_path, "a", [3.0, 3.1])
    seeds_of(tmp_path, "b", [2.0, math.nan], lr=3e-3)
    with pytest.raises(SystemExit) as end:
        door.run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", "-"])
    assert end.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert said["verdicts"][0]["line"] == "B is worse than A: 1 of 2 runs of B ended without a finite loss"
    assert said["rows"][0]["groups"]["B"]["interval"] is None
    assert said["rows"][0]["groups"]["B"]["mean"] is None
    assert said["rows"][0]["place"] == 40
    found = compared(tmp_path / "b", tmp_path / "a")
    assert (found.verdict(1), verdicts(found)[0][:18]) == ("better", "B is better than A")


# ---- at equal amounts


def test_a_value_that_is_not_finite_in_mid_run_is_left_out_and_told(tmp_path):
    made(tmp_path / "a", {10: 3.0, 20: 2.5})
    made(tmp_path / "b", {10: 3.0, 20: math.nan, 30: 2.0, 40: 1.0}, lr=3e-3)
    found = compared(tmp_path)
    assert found.row.means == [2.5, 2.5]  # of b on the line from 10 to 30
    assert "b: 1 of 4 values of val/loss are not finite, and left out" in found.notes
    assert "nan" not in text(found, [])
    made(tmp_path / "c" / "a", train=[3.0] * 40)
    made(tmp_path / "c" / "b", train=[3.0] * 38 + [math.nan, 1.0], lr=3e-3)  # a step that StepGuard has skipped
    found = compared(tmp_path / "c")
    assert (found.row.means, found.verdict(1)) == ([3.0, 1.0], "not known")


def test_runs_are_compared_at_equal_tokens_where_batches_differ(tmp_path):
    made(tmp_path / "a", {10: 4.0, 20: 3.0, 30: 2.0, 40: 1.0})  # 32 tokens a step
    made(tmp_path / "b", {5: 3.5, 10: 2.5, 15: 1.5}, data={"micro_batch_size": 8})  # 64
    found = compared(tmp_path / "a", tmp_path / "b")
    assert (found.at, found.row.place) == ("tokens", 960)  # of 15 steps of b, and of 30 of a
    assert found.row.means == [pytest.approx(2.0), pytest.approx(1.5)]
    assert found.rows["steps"].means == [pytest.approx(3.5), pytest.approx(1.5)]  # halfway between 10 and 20
    assert (found.rows["last"].means, found.rows["best"].means) == ([1.0, 1.5], [1.0, 1.5])
    assert "at equal tokens A had done 75% of its run: its schedule had not ended there" in found.notes
    assert compared(tmp_path / "a", tmp_path / "b", at="last").row.means == [1.0, 1.5]


def test_tokens_of_a_batch_that_grows_are_those_of_its_steps(tmp_path):
    grows = {"train/batch_tokens": {done: 10.0 if done <= 4 else 20.0 for done in range(1, 9)}}
    made(tmp_path / "a", {4: 3.0, 8: 2.0}, more=grows)
    made(tmp_path / "b", {8: 2.0}, more={"train/batch_tokens": {1: 10.0, 8: 20.0}}, data={"x": 1})
    runs, _ = read_runs([str(tmp_path)], {})
    assert runs[0].amounts["tokens"].after([0, 4, 6, 8]).tolist() == [0, 40, 80, 120]
    assert runs[1].amounts["tokens"] is None  # not every step was logged


def test_flops_and_hours_come_from_the_log(tmp_path):
    more = {
        "throughput/model_flops_per_second": dict.fromkeys((10, 20), 5e9),  # of one of four devices
        "throughput/step_seconds": {10: 2.0, 20: 4.0},
        "throughput/tokens_per_second": dict.fromkeys((10, 20), 400.0),
        "throughput/tokens_per_second_per_device": dict.fromkeys((10, 20), 100.0),
        "goodput/wall_seconds": {1: 3600.0, 11: 7200.0, 20: 10440.0},
    }
    made(tmp_path / "a", {10: 3.0, 20: 2.0}, more=more, config=False)
    made(tmp_path / "b", {10: 3.0, 20: 2.0}, config=False)
    a, b = read_runs([str(tmp_path)], {})[0]
    assert a.amounts["flops"].after([1]).tolist() == [4e10]
    assert a.amounts["flops"].after([20])[0] == pytest.approx(
        10 * 4e10 + sum(4e10 * (1 + i / 10) for i in range(1, 11))
    )
    assert a.amounts["tokens"].after([1]).tolist() == [800.0]
    assert a.amounts["hours"].after([1, 6, 11, 20]).tolist() == [1.0, 1.5, 2.0, 2.9]
    assert [b.amounts[axis] for axis in ("tokens", "flops", "hours")] == [None] * 3
    notes = compared(tmp_path).notes
    assert "FLOPs: not known of b (MFUMonitor)" in notes
    assert "hours: not known of b (GoodputMonitor, or an event file)" in notes


def test_without_validation_means_of_the_training_loss_are_compared_and_it_is_said(tmp_path):
    made(tmp_path / "a", train=[1.0 + i for i in range(40)])
    made(tmp_path / "b", train=[2.0 + i for i in range(45)], lr=3e-3)
    found = compared(tmp_path)
    assert found.notes[0].startswith("no validation loss of a and b: compared are means of the training loss")
    series = outcome_of(found.runs[1], "train/loss", 2)
    assert (series.steps[:2].tolist(), series.values[:2].tolist()) == ([2, 4], [2.5, 4.5])
    assert (series.steps[-1], series.values[-1]) == (45, 46.0)  # a last block of one step
    assert found.row.means == [39.5, 40.5]


def test_bits_per_byte_are_compared_where_tokens_are_others(tmp_path):
    bits = lambda end: {"val/bits_per_byte": curve(end)}  # noqa: E731
    made(tmp_path / "a", curve(3.0), more=bits(2.0), data={"vocab_size": 10})
    made(tmp_path / "b", curve(4.0), more=bits(1.0), data={"vocab_size": 20})
    found = compared(tmp_path)
    assert found.metric == "val/bits_per_byte"
    assert found.row.means == [2.0, 1.0]
    assert found.notes[0].startswith("data.vocab_size differs, so bits per byte are compared")
    assert compared(tmp_path, names={"val_loss": "val/loss"}, named=True).metric == "val/loss"
    made(tmp_path / "c", curve(4.0), data={"vocab_size": 30})
    assert compared(tmp_path).notes[0] == (
        "data.vocab_size differs: losses are of other tokens, and do not compare; bits per byte would"
    )


def test_other_validation_rows_are_told(tmp_path):
    made(tmp_path / "a", curve(3.0), data={"val_fraction": 0.1})
    made(tmp_path / "b", curve(4.0), data={"val_fraction": 0.2})
    assert "data.val_fraction differs: the validations may be of other rows" in compared(tmp_path).notes


# ---- the forms


def two(tmp_path):
    more = {"goodput/wall_seconds": {done: 60.0 * done for done in range(1, 41)}}
    seeds_of(tmp_path, "a", [3.00, 3.02, 2.98], more=more)
    seeds_of(tmp_path, "b", [2.80, 2.81, 2.79], lr=3e-3, more=more)
    return compared(tmp_path / "a", tmp_path / "b")


def test_the_text_has_groups_settings_values_and_the_verdict_last(tmp_path):
    found = two(tmp_path)
    lines = text(found, ["left out: c"]).splitlines()
    assert lines[1].split() == ["A", "3", "40", "a/seed_0,", "a/seed_1,", "a/seed_2"]
    words = [" ".join(line.split()) for line in lines]
    assert "lr 0.001 0.003" in words
    assert "at 40 steps, 1.28k tokens 3.0000 2.8000 -0.2000 ± 0.0248" in words
    assert "spread of seeds there 0.0200 0.0100" in words
    assert "note: left out: c" in lines
    assert lines[-2].startswith("compare: B is better than A")
    assert (max(map(len, lines[-2:])) <= 118, lines[-1][:2]) == (True, "  ")


def test_many_settings_are_cut_and_the_page_has_them_all(tmp_path):
    made(tmp_path / "a", curve(3.0), data={f"x{i}": i for i in range(30)})
    made(tmp_path / "b", curve(3.0), data={f"x{i}": -i - 1 for i in range(30)})
    found = compared(tmp_path)
    assert "and 10 more: --html FILE has all" in text(found, [])
    assert all(f">x{i}<" in page(found, []) for i in range(30))


def test_the_terminal_draws_the_first_run_of_each_group_over_the_axis_of_the_verdict(tmp_path, monkeypatch):
    pytest.importorskip("uniplot")
    lines = draw_in_terminal(two(tmp_path), columns=60, unicode=False)
    assert [line for line in lines if line.startswith("val/loss over ")] == ["val/loss over steps"]
    assert all(line.isascii() and len(line) <= 60 for line in lines)
    assert sum("+ A" in line and "x B" in line for line in lines) == 1
    assert not any("⠀" < character <= "⣿" for line in draw_in_terminal(two(tmp_path), 60, True) for character in line)
    monkeypatch.setenv("FORCE_COLOR", "1")  # without colors, letters tell curves apart
    assert any("⠀" < character <= "⣿" for line in draw_in_terminal(two(tmp_path), 60, True) for character in line)
    monkeypatch.delenv("FORCE_COLOR")
    alone = draw_in_terminal(compared(tmp_path / "a"), columns=60, unicode=False)
    assert any("+ seed_0" in line and "x seed_1" in line for line in alone)


def test_without_uniplot_the_tables_stay_and_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uniplot", None)
    (line,) = draw_in_terminal(two(tmp_path), 80, True)
    assert "pip install -e '.[plot]' in the clone" in line


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    found = two(tmp_path)
    written = page(found, ["left out: <c>"])
    assert written.count("<polyline") == 6 * 2  # runs and axes: steps, hours; tokens are in proportion to steps
    assert "val/loss over steps; in all runs a step is 32 tokens<" in written
    assert [written.count(f"<{tag}") for tag in ("figure>", "table", "script")] == [2, 3, 0]
    assert all(written.count(f"<{tag}") == written.count(f"</{tag}>") for tag in ("svg", "table", "polyline", "text"))
    assert "prefers-color-scheme: dark" in written
    assert "left out: &lt;c&gt;" in written
    assert '<td data-head="B - A">-0.2000 ±&nbsp;0.0248</td>' in written
    assert '<th class="left">runs</th>' in written
    assert '<td data-head="runs" class="left">a/seed_0, a/seed_1, a/seed_2</td>' in written
    assert not any(word in written for word in ("http", "src=", "url("))
    assert "B is better than A: val/loss 2.8000 against 3.0000" in written


def test_a_plot_shows_the_end_of_the_curves_and_leaves_out_what_is_not_finite(tmp_path):
    made(tmp_path / "a", {1: 1000.0, 20: 3.0, 30: math.nan, 40: 2.0})
    made(tmp_path / "b", {1: 900.0, 20: 3.5, 30: 3.0, 40: 2.5}, lr=3e-3)
    curves, _ = run_curves(compared(tmp_path), "steps")
    assert curves[0].y.tolist() == [1000.0, 3.0, 2.0]
    assert axis_shown(curves) == (pytest.approx(2.0 - 0.06 * 1.5), pytest.approx(3.5 + 0.06 * 1.5), False)
    assert "nan" not in plot(curves, axis_shown(curves)[:2])
    assert "val/loss over steps; first values, up to 1000, are above the frame" in page(compared(tmp_path), [])
    made(tmp_path / "low" / "a", {1: 1.0, 20: 3.0, 40: 2.0})
    made(tmp_path / "low" / "b", {1: 3.0, 20: 3.0, 40: 2.5}, lr=3e-3)
    assert axis_shown(run_curves(compared(tmp_path / "low"), "steps")[0])[0] < 1.0  # nothing is below the frame
    assert "above the frame" not in page(compared(tmp_path / "low"), [])


def test_a_run_that_diverged_flattens_no_other_one(tmp_path):
    made(tmp_path / "a", {10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0})
    made(tmp_path / "b", {10: 5.0, 20: 30.0, 30: 100.0, 40: 200.0}, lr=10)
    found = compared(tmp_path)
    written = page(found, [])
    assert "val/loss over steps, logarithmic; in all runs" in written
    figure = written.partition("<figure>")[2]
    assert re.findall(r'text-anchor="end">([^<]*)<', figure) == ["10", "100"]
    assert re.findall(r'text-anchor="middle">([^<]*)<', figure) == ["10", "20", "30", "40"]  # not from 0
    low, high = 10 ** (math.log10(2) - 0.06 * 2), 10 ** (math.log10(200) + 0.06 * 2)
    assert axis_shown(run_curves(found, "steps")[0]) == (pytest.approx(low), pytest.approx(high), True)
    assert "A: 2 at the end" in figure
    lines = draw_in_terminal(found, 60, True)
    if len(lines) > 1:  # uniplot is installed
        assert lines[0] == "val/loss over steps, logarithmic"
        heights = [n for n, line in enumerate(lines) if "x" in line and "│" in line]
        assert heights[-1] - heights[0] >= 5  # of 9 lines, B's from 5 to 200
        assert next(n for n, line in enumerate(lines) if line.endswith("│ 100")) < 5  # not in the middle
    made(tmp_path / "b", {10: 5.0, 20: 30.0, 30: -1.0, 40: 200.0}, lr=10)
    assert "logarithmic" not in page(compared(tmp_path), [])


def test_short_times_are_in_minutes_or_seconds(tmp_path):
    def shown(name, seconds):
        for lr in (1, 2):
            wall = {done: seconds / 40 * done for done in range(1, 41)}
            made(tmp_path / name / str(lr), curve(3.0), more={"goodput/wall_seconds": wall}, lr=lr)
        found = compared(tmp_path / name, at="hours")
        assert f" over {name}<" in page(found, [])
        return next(line for line in text(found, []).splitlines() if line.startswith("at "))[: len(f"at 40 {name}")]

    assert shown("hours", 3600) == "at 1 hours "
    assert shown("minutes", 240) == "at 4 minutes "
    assert shown("seconds", 40) == "at 40 seconds"


def test_runs_without_a_common_step_are_compared_at_their_ends(tmp_path):
    made(tmp_path / "b", {10: 5.0, 20: 4.0})
    made(tmp_path / "c", {30: 2.0, 40: 1.0}, lr=4e-3)
    apart = compared(tmp_path / "b", tmp_path / "c")
    assert apart.at == "last"
    assert "not compared at equal steps: one run ended before another logged its first loss" in apart.notes


def test_the_command_writes_each_form_and_exits_by_the_verdict(tmp_path, capsys):
    two(tmp_path)
    files = [word for form in ("html", "json") for word in (f"--{form}", str(tmp_path / f"out.{form}"))]
    door.run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), *files])  # better: exits with 0
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["verdicts"][0]["verdict"] == "better"
    assert said["settings_that_differ"]["lr"] == {"A": "0.001", "B": "0.003"}
    assert said["rows"][0]["groups"]["B"]["runs"]["b/seed_1"] == pytest.approx(2.81)
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == page(compared(tmp_path / "a", tmp_path / "b"), [])
    with pytest.raises(SystemExit) as end:
        door.run(["compare", str(tmp_path / "b"), str(tmp_path / "a")])
    assert end.value.code == 1
    assert "compare: B is worse than A" in capsys.readouterr().out


def test_a_named_run_that_cannot_be_read_hides_no_other_and_ends_with_2(tmp_path, capsys):
    """The first one is what the others are compared with: without it there is nothing to say."""
    made(tmp_path / "a", curve(3.0))
    made(tmp_path / "b", curve(2.0), lr=3e-3)
    made(tmp_path / "bad", curve(2.0), lr=4e-3)
    (tmp_path / "bad" / "metrics.csv").write_bytes(b"\x00" * 400)
    (tmp_path / "folder" / "version_0").mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        door.run(["compare", *(str(tmp_path / name) for name in ("a", "bad", "b", "folder"))])
    words = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 2
    assert f"left out: {tmp_path / 'bad'}: its log holds no scalars" in words
    assert f"left out: {tmp_path / 'folder' / 'version_0'}: its log holds no scalars" in words
    assert words.count("settings that differ") == 1
