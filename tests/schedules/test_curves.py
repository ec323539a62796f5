"""Each curve: values worked out by hand, properties, and every refused setting."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.schedules import (
    CosineRestarts,
    PowerDecay,
    Schedule,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)

SCHEDULES = [WarmupCosine, WarmupLinear, WarmupInverseSqrt, WarmupConstant, WarmupStableDecay, PowerDecay]
SHAPES = ["linear", "cosine", "1-sqrt"]
ratios = st.floats(0, 1)


@st.composite
def fitting_runs(draw):
    """A schedule and a length of run that it accepts."""
    warmup = draw(st.integers(0, 50))
    total = warmup + draw(st.integers(1, 200))
    ratio = draw(ratios)
    decay = draw(
        st.one_of(
            st.builds(lambda n: {"decay_steps": n}, st.integers(1, total - warmup)),
            st.builds(lambda n: {"decay_start": n}, st.integers(warmup, total - 1)),
        )
    )
    schedule = draw(
        st.sampled_from(
            [
                WarmupCosine(warmup_steps=warmup, min_ratio=ratio),
                WarmupLinear(warmup_steps=warmup, min_ratio=ratio),
                WarmupInverseSqrt(warmup_steps=warmup, min_ratio=ratio),
                WarmupConstant(warmup_steps=warmup),
                *(WarmupStableDecay(warmup_steps=warmup, min_ratio=ratio, decay_shape=s, **decay) for s in SHAPES),
                PowerDecay(warmup_steps=warmup, min_ratio=ratio, power=draw(st.floats(0.01, 5)), **decay),
                CosineRestarts(
                    cycle_steps=draw(st.integers(1, 60)),
                    cycle_mult=draw(st.integers(1, 3)),
                    warmup_steps=warmup,
                    min_ratio=ratio,
                ),
            ]
        )
    )
    return schedule, total


def curve(schedule, total, steps=None):
    return [schedule.factor(step, total) for step in range(steps or total)]


# ---- properties of all curves


@given(fitting_runs(), st.integers(0, 1000), st.floats(1e-6, 10))
@settings(max_examples=300)
def test_each_curve_starts_warms_up_falls_and_ends_as_promised(run, beyond, peak):
    schedule, total = run
    warmup, floor = schedule.warmup_steps, getattr(schedule, "min_ratio", 1.0)
    values = curve(schedule, total, total + 20)
    assert all(0 <= value <= 1 for value in values)
    assert values[0] == 1 / max(1, warmup)  # one part in warmup, never 0
    assert values[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert min(values[warmup:]) >= floor
    if not isinstance(schedule, CosineRestarts):
        assert all(late <= early for early, late in pairwise(values[max(0, warmup - 1) :]))
    if schedule.needs_total:
        assert schedule.factor(total + beyond, total) == floor
    assert [schedule.factor(step, total) for step in reversed(range(total))] == values[:total][::-1]  # in any order
    step = beyond % (total + 20)
    assert schedule.lr(peak, step, total) == pytest.approx(peak * values[step], rel=1e-12, abs=1e-18)


# ---- the reference curve, to the last digit


def test_warmup_cosine_is_the_reference_curve_of_gpt2_124m_bit_for_bit():
    peak, low, warmup, total = 6e-4, 6e-5, 715, 143_000
    schedule = WarmupCosine(warmup_steps=warmup, min_ratio=0.1)

    def reference(step):
        if step < warmup:
            return peak * (step + 1) / warmup
        if step > total:
            return low
        return low + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * (peak - low)

    steps = [*range(0, 2000), *range(2000, total, 97), *range(total - 100, total + 100)]
    assert [schedule.lr(peak, step, total) for step in steps] == [reference(step) for step in steps]
    assert schedule.lr(peak, 0, total) == 6e-4 / 715
    assert schedule.lr(peak, total, total) == 6e-5


# ---- values worked out by hand

HALF = math.sqrt(0.5)
STABLE = {  # the decay of each shape over four steps
    "linear": [1, 0.75, 0.5, 0.25],
    "cosine": [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)],
    "1-sqrt": [1, 0.5, 1 - HALF, 1 - math.sqrt(0.75)],
}
BY_HAND = [
    # warmup 1/2, 2/2; then cos of 0, 45, 90, 135 degrees between 1 and 0.2; then the floor
    (
        WarmupCosine(warmup_steps=2, min_ratio=0.2), 6,
        [0.5, 1, 1, 0.2 + 0.4 * (1 + HALF), 0.6, 0.2 + 0.4 * (1 - HALF), 0.2, 0.2],
    ),
    (WarmupLinear(warmup_steps=2), 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
    (WarmupLinear(warmup_steps=0, min_ratio=0.5), 4, [1, 0.875, 0.75, 0.625, 0.5]),
    (WarmupConstant(warmup_steps=4), None, [0.25, 0.5, 0.75, 1, 1, 1]),
    *(
        (WarmupStableDecay(warmup_steps=2, decay_steps=4, decay_shape=shape), 8, [0.5, 1, 1, 1, *decay, 0, 0])
        for shape, decay in STABLE.items()
    ),
    # the squares of 4/4, 3/4, 2/4, 1/4
    (PowerDecay(warmup_steps=2, decay_steps=4, power=2), 8, [0.5, 1, 1, 1, 1, 0.5625, 0.25, 0.0625, 0, 0]),
    (PowerDecay(warmup_steps=0, decay_steps=2, power=2, min_ratio=0.5), 3, [1, 1, 0.625, 0.5, 0.5]),
    (
        CosineRestarts(cycle_steps=2, cycle_mult=2, warmup_steps=2), None,
        [0.5, 1, 1, 0.5, 1, 0.5 * (1 + HALF), 0.5, 0.5 * (1 - HALF), 1],
    ),
    (CosineRestarts(cycle_steps=2, min_ratio=0.5), None, [1, 0.75, 1, 0.75, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "total", "expected"), BY_HAND, ids=lambda value: type(value).__name__)
def test_by_hand(schedule, total, expected):
    assert curve(schedule, total, steps=len(expected)) == pytest.approx(expected, abs=1e-15)


def test_warmup_inverse_sqrt_by_hand():
    schedule = WarmupInverseSqrt(warmup_steps=4)
    assert [schedule.factor(step, None) for step in (0, 3, 15, 63, 399)] == [0.25, 1, 0.5, 0.25, 0.1]
    assert WarmupInverseSqrt(warmup_steps=0).factor(24, None) == 0.2  # 1 / sqrt(25)
    assert WarmupInverseSqrt(warmup_steps=4, min_ratio=0.3).factor(10_000, None) == 0.3


@pytest.mark.parametrize("cls", [WarmupStableDecay, PowerDecay])
def test_the_three_ways_to_give_a_decay_agree(cls):
    by_steps = cls(warmup_steps=2, decay_steps=4)
    by_fraction = cls(warmup_steps=2, decay_fraction=0.4)
    by_start = cls(warmup_steps=2, decay_start=6)
    assert curve(by_steps, 10) == curve(by_fraction, 10) == curve(by_start, 10)


def test_a_branched_decay_shares_the_stable_part_whatever_its_length():
    short = WarmupStableDecay(warmup_steps=3, decay_start=50)
    trunk = WarmupStableDecay(warmup_steps=3, decay_steps=1)
    assert curve(short, 60, steps=51) == curve(trunk, 100_000, steps=51)
    assert short.factor(55, 60) == 1 - math.sqrt(0.5)


def test_power_decay_is_the_curve_of_the_record():
    """Settings of the embedding in record 46 (PowerCool): flat until step 1487 of 2900."""
    peak, c, total = 0.3, 4.976805410800738e-05, 2900
    schedule = PowerDecay(warmup_steps=0, decay_start=1487)
    record = [min(peak, c * max(0.0, total - step) ** 1.2) for step in range(total + 10)]
    assert [schedule.lr(peak, step, total) for step in range(total + 10)] == pytest.approx(record, rel=1e-14)
    assert schedule.lr(peak, 1487, total) == peak > schedule.lr(peak, 1488, total)


def test_the_defaults_are_those_that_the_docstrings_give():
    assert WarmupCosine(warmup_steps=0).factor(10, 10) == 0.1
    assert WarmupLinear(warmup_steps=0).factor(10, 10) == 0
    assert WarmupInverseSqrt(warmup_steps=1).factor(10**8, None) == pytest.approx(1e-4)
    assert WarmupStableDecay(warmup_steps=0).factor(30, 30) == 0
    assert WarmupStableDecay(warmup_steps=0).factor(95, 100) == 1 - math.sqrt(0.5)  # 1-sqrt
    assert curve(PowerDecay(warmup_steps=0), 100).count(1.0) == 21  # steps 0 to 20; 20 starts the decay
    assert PowerDecay(warmup_steps=0).factor(60, 100) == 0.5**1.2
    assert CosineRestarts(cycle_steps=4).factor(4, None) == CosineRestarts(cycle_steps=4).factor(0, None) == 1


# ---- refusals

ENDLESS = [WarmupInverseSqrt, WarmupConstant]
RUNS = [cls(warmup_steps=5) for cls in SCHEDULES] + [CosineRestarts(cycle_steps=1, warmup_steps=5)]
DECAYS = {
    "decay_steps=0": {"decay_steps": 0},
    "decay_fraction=1.5": {"decay_fraction": 1.5},
    "decay_fraction=nan": {"decay_fraction": math.nan},
    "decay_start=-1": {"decay_start": -1},
    "decay_steps and decay_start are both given": {"decay_steps": 3, "decay_start": 3},
}
SETTINGS: list[tuple[type, dict, str]] = [
    *((cls, {"warmup_steps": bad}, "warmup_steps=") for cls in SCHEDULES for bad in (-1, math.nan, 2.0, True, "3")),
    *(
        (cls, {"min_ratio": bad}, "min_ratio=")
        for cls in SCHEDULES if cls is not WarmupConstant
        for bad in (-0.1, 1.1, math.nan, math.inf, True, "low")
    ),
    *((cls, settings, said) for cls in (WarmupStableDecay, PowerDecay) for said, settings in DECAYS.items()),
    *((PowerDecay, {"power": bad}, "power=.*above 0") for bad in (0, -1.2, math.nan, math.inf, True, "2")),
    (WarmupStableDecay, {"decay_shape": "square"}, "decay_shape='square': give one of linear, cosine, 1-sqrt"),
    (CosineRestarts, {"cycle_steps": 0}, "cycle_steps=0"),
    (CosineRestarts, {"cycle_steps": 3, "cycle_mult": 0}, "cycle_mult=0"),
    (CosineRestarts, {"cycle_steps": 3, "cycle_mult": 1.5}, "cycle_mult=1.5"),
    (CosineRestarts, {"cycle_steps": 3, "warmup_steps": -1}, "warmup_steps=-1"),
    (CosineRestarts, {"cycle_steps": 3, "min_ratio": 2}, "min_ratio=2"),
]  # fmt: skip
LENGTHS: list[tuple[Schedule, int | None, str]] = [
    *(
        (cls(warmup_steps=1), missing, rf"{cls.__name__} .*trainer\.max_steps \(now {missing}\)")
        for cls in SCHEDULES if cls not in ENDLESS for missing in (None, -1)
    ),
    *((schedule, 5, r"warmup_steps=5 is not below trainer\.max_steps=5") for schedule in RUNS),
    *(
        (cls(warmup_steps=5, **decay), 10, f"{cls.__name__}: .*{said}")
        for cls in (WarmupStableDecay, PowerDecay)
        for decay, said in (
            ({"decay_steps": 6}, "starts at step 4, before warmup_steps=5"),
            ({"decay_start": 10}, r"starts at step 10, not before trainer\.max_steps=10"),
            ({"decay_fraction": 0.0}, "starts at step 10, not before"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "settings", "said"), SETTINGS)
def test_a_bad_setting_is_named_in_one_line(cls, settings, said):
    with pytest.raises(UsageError, match=rf"^{cls.__name__}\b[^\n]*{said}[^\n]*$"):
        cls(**{"warmup_steps": 1, **settings})


@pytest.mark.parametrize(("schedule", "total", "said"), LENGTHS)
def test_a_run_that_does_not_fit_is_named_in_one_line(schedule, total, said):
    for call in (lambda: schedule.check(total), lambda: schedule.factor(7, total)):
        with pytest.raises(UsageError, match=said) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_a_curve_of_ones_own_needs_only_lr():
    class Halving(Schedule):
        def lr(self, peak, step, total_steps):
            return peak / 2**step

    Halving().check(None)
    assert Halving().factor(2, None) == 0.25
    with pytest.raises(TypeError):
        Schedule()
