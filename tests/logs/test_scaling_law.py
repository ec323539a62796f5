"""Forecasts from a ladder: exact on ladders that follow the law, within the interval on noisy ones, and refused where a
figure would mislead."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.scaling_law import Rung, SeededLosses, _Points, forecast, speedup, t95

TOP = 1e17


def law(flops):
    """A floor of half the largest rung's loss."""
    return 1.5 + 1.5 * (flops / TOP) ** -0.2


def power(flops):
    return 3.0 * (flops / TOP) ** -0.07


def ladder(loss=law, rungs=5, decades=2.0, noise=0.0, seeds=2, rng=None):
    """Rungs up to `TOP`, with equal seeds or with drawn ones."""
    made = []
    for flops in np.geomspace(TOP / 10**decades, TOP, rungs).tolist():
        factors = np.exp(noise * rng.standard_normal(seeds)) if rng else np.ones(seeds)
        made.append(Rung(flops, tuple((loss(flops) * factors).tolist())))
    return made


def changed(rungs, number, factor):
    """A ladder with the losses of one rung times a factor."""
    losses = tuple(factor * loss for loss in rungs[number].losses)
    return [*rungs[:number], replace(rungs[number], losses=losses), *rungs[number + 1 :]]


# ---- forecast


def test_a_ladder_on_the_law_gives_the_laws_loss():
    found = forecast(ladder(), 10 * TOP)
    assert found.loss == pytest.approx(1.5 + 1.5 * 10**-0.2, rel=1e-5)
    assert found.low < found.loss < found.high
    assert (found.distance, found.refusal, found.has_floor) == (pytest.approx(10), None, True)


def test_a_power_law_shows_no_floor_and_is_told_up_to_four_times():
    found = forecast(ladder(power), 4 * TOP)
    assert (found.loss, found.refusal, found.has_floor) == (pytest.approx(3 * 4**-0.07), None, False)
    assert forecast(ladder(power), 4.1 * TOP).refusal == (
        "4.1 times the largest rung: rungs that show no floor tell up to 4 times: add a larger rung"
    )


def test_a_power_laws_interval_is_that_of_a_straight_line_or_wider():
    rungs = [replace(rung, losses=rung.losses[:1]) for rung in ladder(power, 4, 3.0)]  # x = -3, -2, -1, 0 decades
    # the assumed noise, whose squares of two degrees of freedom make four with those of the residuals, which are 0
    sd = math.sqrt(2 * 0.004**2 / 4)
    half = t95(4) * sd * math.sqrt(1 + 1 / 4 + (math.log10(4) + 1.5) ** 2 / 5)
    ends = [3 * 4**-0.07 * math.exp(sign * half) for sign in (-1, 1)]
    assert _Points.of(rungs).polynomial_interval(1, math.log(4)) == (
        pytest.approx(ends[0] / 3),
        pytest.approx(ends[1] / 3),
    )
    found = forecast(rungs, 4 * TOP)
    assert found.low <= ends[0] * (1 + 1e-9)
    assert found.high >= ends[1] * (1 - 1e-9)


def test_the_noise_is_that_of_the_seeds_pooled_with_an_assumed_one():
    rungs = ladder(seeds=1)
    rungs[0] = replace(rungs[0], losses=(5.0, 5.0 * math.exp(0.01)))  # variance 0.01**2 / 2, one degree of freedom
    found = forecast(rungs, 10 * TOP)
    assert found.noise == pytest.approx(math.sqrt((0.01**2 / 2 + 2 * 0.004**2) / 3))
    assert found.noise_df == 1


@pytest.mark.parametrize("loss", [law, power])
def test_units_and_order_do_not_matter(loss):
    rungs = ladder(loss, noise=0.003, rng=np.random.default_rng(0))
    first = forecast(rungs, 3 * TOP)
    other = [Rung(7e3 * rung.flops, tuple(0.3 * one for one in rung.losses)) for rung in reversed(rungs)]
    second = forecast(other, 7e3 * 3 * TOP)
    for name in ("loss", "low", "high"):
        assert getattr(second, name) == pytest.approx(0.3 * getattr(first, name), rel=1e-4)
    assert (second.refusal, second.has_floor) == (first.refusal, first.has_floor)
    assert forecast(rungs, 3 * TOP) == first


def test_more_seeds_and_a_longer_ladder_narrow_the_interval_and_distance_widens_it():
    def width(flops, **options):
        found = forecast(ladder(**options), flops)
        return found.high - found.low

    assert width(10 * TOP, seeds=6) < width(10 * TOP, seeds=2) < width(10 * TOP, seeds=1)
    assert width(10 * TOP, decades=3.0) < width(10 * TOP, decades=2.0)
    assert width(2 * TOP) < width(10 * TOP)


@pytest.mark.parametrize("factor", [1.0, 1.02, 0.98])
def test_intervals_hold_the_loss_also_with_a_smallest_rung_off_the_law(factor):
    rng, inside = np.random.default_rng(1), 0
    for _ in range(40):
        found = forecast(changed(ladder(noise=0.003, rng=rng), 0, factor), 10 * TOP)
        inside += found.low <= law(10 * TOP) * math.exp(0.003 * rng.standard_normal()) <= found.high
    assert inside >= 35


def test_a_curve_that_bends_down_is_not_told_far():
    def bending(flops):
        place = 1 + math.log10(flops / TOP) / 2
        return 4.5 * math.exp(-2 * math.log(10) * (0.070 * place + 0.0075 * place**2))

    assert "no floor" in forecast(ladder(bending), 10 * TOP).refusal
    found = forecast(ladder(bending), 4 * TOP)
    assert found.low < bending(4 * TOP) < found.loss  # the parabola's interval reaches below the straight line


@pytest.mark.parametrize(
    ("rungs", "distance", "line"),
    [
        (ladder(rungs=3), 4, "3 rungs: a forecast needs 4 or more"),
        (ladder(decades=0.9), 2, "the rungs span 7.94 times the compute: a forecast needs 10 times or more"),
        (ladder(), 11, "11 times the largest rung: rungs that span 100 times tell up to 10 times: add a larger rung"),
        (ladder(), 0.5, "0.5 times the largest rung: a ladder tells of larger runs"),
        (
            [*ladder()[:-1], replace(ladder()[-1], repeats_data=True)],
            10,
            "the largest rung reads some tokens more than once, which the law leaves out: give more text",
        ),
    ],
)
def test_a_refusal_says_why(rungs, distance, line):
    found = forecast(rungs, distance * TOP)
    assert found.refusal == line
    assert found.low < found.loss < found.high


def test_two_rungs_give_no_figures():
    found = forecast(ladder(rungs=2), 2 * TOP)
    assert found.refusal == "2 rungs: a forecast needs 4 or more"
    assert math.isnan(found.loss)


def test_a_smallest_rung_that_decides_the_forecast_is_refused():
    found = forecast(changed(ladder(seeds=4), 0, 1.12), 10 * TOP)
    assert found.refusal.startswith("without the smallest rung the loss moves by 0.")
    assert found.refusal.endswith(": leave that rung out, and add a larger one")


def test_noise_as_large_as_the_gain_is_refused():
    found = forecast(ladder(noise=0.03, rng=np.random.default_rng(0)), 4 * TOP)
    assert found.refusal.startswith("the interval is 0.")
    assert found.refusal.endswith(": add seeds to rungs, or a larger rung")


def test_impossible_ladders_are_errors():
    with pytest.raises(
        UsageError, match=r"^loss=nan of a run of 1e\+17 FLOPs: give a positive number, or "
    ):
        Rung(TOP, (3.0, math.nan))
    with pytest.raises(UsageError, match=r"^flops=0 of a run of 0 FLOPs: give a positive number"):
        SeededLosses(0, {"0": 3.0})
    with pytest.raises(UsageError, match="without a loss: give one or more"):
        Rung(TOP, ())
    with pytest.raises(UsageError, match=r"^two rungs of 1e\+17 FLOPs: give one rung with the losses of both$"):
        forecast([*ladder(), Rung(TOP, (3.0,))], 10 * TOP)
    with pytest.raises(UsageError, match=r"^a ladder without rungs: give 4 or more$"):
        forecast([], TOP)
    with pytest.raises(UsageError, match=r"^a ladder of 2 rungs: a speedup needs 3 or more$"):
        speedup(ladder(rungs=2), seeded(3.0), seeded(2.9))


# ---- speedup


def seeded(*losses, flops=TOP):
    return SeededLosses(flops, {str(seed): loss for seed, loss in enumerate(losses)})


def test_a_speedup_is_what_the_law_says():
    found = speedup(ladder(seeds=4), seeded(3.0, 3.0, 3.0), seeded(2.9, 2.9, 2.9))
    assert found.factor == pytest.approx((1.5 / 1.4) ** 5, rel=0.02)  # 1.41
    assert found.low < (1.5 / 1.4) ** 5 < found.high
    assert (found.refusal, found.method) == (None, "floor")
    back = speedup(ladder(seeds=4), seeded(2.9, 2.9, 2.9), seeded(3.0, 3.0, 3.0))
    assert back.factor == pytest.approx(1 / found.factor, rel=0.01)


def test_half_the_compute_for_the_same_loss_is_twice_as_fast():
    found = speedup(ladder(seeds=4), seeded(3.0, 3.0), seeded(2.9, 2.9, flops=TOP / 2))
    assert found.factor == pytest.approx(2 * (1.5 / 1.4) ** 5, rel=0.02)


def test_without_a_floor_a_speedup_is_by_the_local_slope_and_inside_the_ladder():
    found = speedup(ladder(power), seeded(3.0, 3.0), seeded(2.94, 2.94))
    assert found.factor == pytest.approx((3.0 / 2.94) ** (1 / 0.07), rel=0.01)
    assert (found.refusal, found.method) == (None, "local slope")
    assert speedup(ladder(power), seeded(3.0), seeded(2.94, flops=2 * TOP)).refusal == (
        "a run has 2 times the compute of the largest rung: a ladder that shows no floor tells up to 1 times"
    )


def test_equal_runs_are_one_times_as_fast_and_no_difference_is_claimed():
    found = speedup(ladder(), seeded(3.0), seeded(3.0))
    assert found.low < 1 < found.high
    assert found.factor == pytest.approx(1, abs=0.01)
    assert found.refusal.startswith("the losses differ by 0.00%, and by up to ")
    assert speedup(ladder(), seeded(3.0), seeded(2.99)).refusal.startswith("the losses differ by 0.33%, ")
    assert speedup(ladder(), seeded(3.0), seeded(2.94)).refusal is None


def test_paired_seeds_narrow_the_interval():
    rungs, noise = ladder(noise=0.005, rng=np.random.default_rng(0)), (1.01, 0.99, 1.005, 0.995, 1.0, 1.002)
    a = seeded(*(3.0 * factor for factor in noise))
    b = seeded(*(2.95 * factor for factor in noise))
    paired = speedup(rungs, a, b)
    single = speedup(rungs, a, SeededLosses(TOP, {f"other {seed}": loss for seed, loss in b.losses.items()}))
    assert math.log(paired.high / paired.low) < 0.7 * math.log(single.high / single.low)
    assert paired.refusal is None


@pytest.mark.parametrize(
    ("a", "b", "flops", "line"),
    [
        (3.0, 2.9, 11 * TOP, "a run has 11 times the compute of the largest rung: a ladder tells up to 10 times"),
        (1.6, 1.4, 10 * TOP, "a loss is as low as the floor of the ladder may be: add a larger rung"),
        (2.9, 1.8, TOP, "the interval is from "),
    ],
)
def test_a_refused_speedup_says_why(a, b, flops, line):
    found = speedup(ladder(), seeded(a, a, flops=flops), seeded(b, b, flops=flops))
    assert found.refusal.startswith(line)


def test_the_quantiles_of_students_t():
    for df, value in {3: 2.3534, 4: 2.1318, 5: 2.0150, 8: 1.8595, 30: 1.6973}.items():
        assert t95(df) == pytest.approx(value, rel=3e-3)
