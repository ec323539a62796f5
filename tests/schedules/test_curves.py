"""Each curve: values worked out by hand, properties, and every refused setting."""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks._errors import UsageError
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


@given(fitting_runs(), st.integers(0, 400))
def test_the_factor_stays_between_0_and_1(run, step):
    schedule, total = run
    assert 0 <= schedule.factor(step, total) <= 1


@given(fitting_runs())
def test_the_first_step_is_one_part_in_warmup_and_never_0(run):
    schedule, total = run
    assert schedule.factor(0, total) == 1 / max(1, schedule.warmup_steps)


@given(fitting_runs())
def test_the_warmup_is_the_straight_line_that_reaches_the_peak_with_its_last_step(run):
    schedule, total = run
    warmup = schedule.warmup_steps
    assert curve(schedule, total)[:warmup] == [(step + 1) / warmup for step in range(warmup)]


@given(fitting_runs())
def test_after_the_warmup_only_restarts_go_up(run):
    schedule, total = run
    after = curve(schedule, total, total + 20)[max(0, schedule.warmup_steps - 1) :]
    if not isinstance(schedule, CosineRestarts):
        assert all(late <= early for early, late in pairwise(after))


@given(fitting_runs())
def test_after_the_warmup_the_floor_is_never_broken(run):
    schedule, total = run
    floor = getattr(schedule, "min_ratio", 1.0)
    assert min(curve(schedule, total, total + 20)[schedule.warmup_steps :]) >= floor


@given(fitting_runs(), st.integers(0, 1000))
def test_past_the_end_the_value_is_the_floor_where_the_curve_has_an_end(run, beyond):
    schedule, total = run
    if schedule.needs_total:
        assert schedule.factor(total + beyond, total) == schedule.min_ratio


@given(fitting_runs(), st.integers(0, 300), st.floats(1e-6, 10))
def test_lr_is_the_peak_times_the_factor(run, step, peak):
    schedule, total = run
    assert schedule.lr(peak, step, total) == pytest.approx(peak * schedule.factor(step, total), rel=1e-12, abs=1e-18)


@given(fitting_runs())
@settings(max_examples=20)
def test_steps_may_be_asked_for_in_any_order(run):
    schedule, total = run
    backwards = [schedule.factor(step, total) for step in reversed(range(total))]
    assert curve(schedule, total) == backwards[::-1]


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


def test_warmup_cosine_by_hand():
    values = curve(WarmupCosine(warmup_steps=2, min_ratio=0.2), 6, steps=8)
    # warmup 1/2, 2/2; then cos of 0, 45, 90, 135 degrees between 1 and 0.2; then the floor
    low, half = 0.2, math.sqrt(0.5)
    expected = [0.5, 1, 1, low + 0.4 * (1 + half), 0.6, low + 0.4 * (1 - half), 0.2, 0.2]
    assert values == pytest.approx(expected, abs=1e-15)


def test_warmup_linear_by_hand():
    assert curve(WarmupLinear(warmup_steps=2), 6, steps=8) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert curve(WarmupLinear(warmup_steps=0, min_ratio=0.5), 4, steps=5) == [1, 0.875, 0.75, 0.625, 0.5]


def test_warmup_inverse_sqrt_by_hand():
    schedule = WarmupInverseSqrt(warmup_steps=4)
    assert [schedule.factor(step, None) for step in (0, 3, 15, 63, 399)] == [0.25, 1, 0.5, 0.25, 0.1]
    assert WarmupInverseSqrt(warmup_steps=0).factor(24, None) == 0.2  # 1 / sqrt(25)
    assert WarmupInverseSqrt(warmup_steps=4, min_ratio=0.3).factor(10_000, None) == 0.3


def test_warmup_constant_by_hand():
    assert curve(WarmupConstant(warmup_steps=4), None, steps=6) == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ("1-sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ],
)
def test_warmup_stable_decay_by_hand(shape, decay):
    schedule = WarmupStableDecay(warmup_steps=2, decay_steps=4, decay_shape=shape)
    assert curve(schedule, 8, steps=10) == pytest.approx([0.5, 1, 1, 1, *decay, 0, 0], abs=1e-15)


@pytest.mark.parametrize("cls", [WarmupStableDecay, PowerDecay])
def test_the_three_ways_to_give_a_decay_agree(cls):
    by_steps = cls(warmup_steps=2, decay_steps=4)
    by_fraction = cls(warmup_steps=2, decay_fraction=0.4)
    by_start = cls(warmup_steps=2, decay_start=6)
    assert curve(by_steps, 10) == curve(by_fraction, 10) == curve(by_start, 10)


def test_without_a_length_the_last_tenth_decays():
    assert curve(WarmupStableDecay(warmup_steps=0), 30).count(1.0) == 28  # steps 0 to 27; 27 starts the decay


def test_a_branched_decay_shares_the_stable_part_whatever_its_length():
    short = WarmupStableDecay(warmup_steps=3, decay_start=50)
    trunk = WarmupStableDecay(warmup_steps=3, decay_steps=1)
    assert curve(short, 60, steps=51) == curve(trunk, 100_000, steps=51)
    assert short.factor(55, 60) == 1 - math.sqrt(0.5)


def test_power_decay_by_hand():
    schedule = PowerDecay(warmup_steps=2, decay_steps=4, power=2)
    # warmup 1/2, 2/2; the peak; then the squares of 4/4, 3/4, 2/4, 1/4; then the floor
    assert curve(schedule, 8, steps=10) == [0.5, 1, 1, 1, 1, 0.5625, 0.25, 0.0625, 0, 0]
    floored = PowerDecay(warmup_steps=0, decay_steps=2, power=2, min_ratio=0.5)
    assert curve(floored, 3, steps=5) == [1, 1, 0.625, 0.5, 0.5]


def test_power_decay_is_the_curve_of_the_record():
    """Settings of the embedding in record 46 (PowerCool): flat until step 1487 of 2900."""
    peak, c, total = 0.3, 4.976805410800738e-05, 2900
    schedule = PowerDecay(warmup_steps=0, decay_start=1487)
    record = [min(peak, c * max(0.0, total - step) ** 1.2) for step in range(total + 10)]
    assert [schedule.lr(peak, step, total) for step in range(total + 10)] == pytest.approx(record, rel=1e-14)
    assert schedule.lr(peak, 1487, total) == peak > schedule.lr(peak, 1488, total)


@given(st.integers(0, 99), st.floats(0.1, 4))
def test_power_decay_is_the_smaller_of_peak_and_power(step, power):
    schedule, peak = PowerDecay(warmup_steps=0, decay_start=40, power=power), 6e-4
    c = peak / (100 - 40) ** power
    assert schedule.lr(peak, step, 100) == pytest.approx(min(peak, c * (100 - step) ** power), rel=1e-12)


def test_a_power_of_1_is_a_straight_line():
    straight = WarmupStableDecay(warmup_steps=3, decay_steps=50, decay_shape="linear", min_ratio=0.1)
    power = PowerDecay(warmup_steps=3, decay_steps=50, power=1, min_ratio=0.1)
    assert curve(power, 100) == pytest.approx(curve(straight, 100), abs=1e-15)


def test_cosine_restarts_by_hand():
    schedule = CosineRestarts(cycle_steps=2, cycle_mult=2, warmup_steps=2)
    half = math.sqrt(0.5)
    expected = [0.5, 1, 1, 0.5, 1, 0.5 * (1 + half), 0.5, 0.5 * (1 - half), 1]
    assert curve(schedule, None, steps=9) == pytest.approx(expected, abs=1e-15)


def test_cosine_restarts_of_equal_cycles_by_hand():
    schedule = CosineRestarts(cycle_steps=2, min_ratio=0.5)
    assert curve(schedule, None, steps=5) == pytest.approx([1, 0.75, 1, 0.75, 1])


@pytest.mark.parametrize("cls", [*SCHEDULES, CosineRestarts])
def test_a_schedule_cannot_change_while_a_run_uses_it(cls):
    schedule = cls(warmup_steps=1, **({"cycle_steps": 10} if cls is CosineRestarts else {}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.warmup_steps = 5


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


@pytest.mark.parametrize("cls", [WarmupCosine, WarmupLinear, WarmupStableDecay, PowerDecay])
@pytest.mark.parametrize("missing", [None, -1])
def test_a_curve_with_an_end_names_max_steps_where_it_is_missing(cls, missing):
    schedule = cls(warmup_steps=1)
    for call in (lambda: schedule.check(missing), lambda: schedule.factor(5, missing)):
        with pytest.raises(UsageError, match=rf"{cls.__name__} .*trainer\.max_steps \(now {missing}\)"):
            call()


@pytest.mark.parametrize(
    "schedule",
    [WarmupConstant(warmup_steps=1), WarmupInverseSqrt(warmup_steps=1), CosineRestarts(cycle_steps=1)],
)
def test_a_curve_without_an_end_needs_no_max_steps(schedule):
    schedule.check(-1)
    assert 0 < schedule.factor(10**6, None) <= 1


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(warmup_steps=5),
        WarmupLinear(warmup_steps=5),
        WarmupStableDecay(warmup_steps=5),
        PowerDecay(warmup_steps=5),
        WarmupInverseSqrt(warmup_steps=5),
        WarmupConstant(warmup_steps=5),
        CosineRestarts(cycle_steps=1, warmup_steps=5),
    ],
)
def test_a_warmup_as_long_as_the_run_is_refused(schedule):
    schedule.check(6 if not isinstance(schedule, WarmupStableDecay | PowerDecay) else 100)
    with pytest.raises(UsageError, match=r"warmup_steps=5 is not below trainer\.max_steps=5"):
        schedule.check(5)
    with pytest.raises(UsageError, match="warmup_steps=5"):
        schedule.factor(7, 5)


@pytest.mark.parametrize("cls", SCHEDULES)
@pytest.mark.parametrize("bad", [-1, math.nan, 2.0, True, "3"])
def test_a_warmup_that_is_no_whole_number_is_refused(cls, bad):
    with pytest.raises(UsageError, match=rf"{cls.__name__}\.warmup_steps="):
        cls(warmup_steps=bad)


@pytest.mark.parametrize("cls", [WarmupCosine, WarmupLinear, WarmupInverseSqrt, WarmupStableDecay, PowerDecay])
@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf, True, "low"])
def test_a_floor_outside_0_to_1_is_refused(cls, bad):
    with pytest.raises(UsageError, match=rf"{cls.__name__}\.min_ratio="):
        cls(warmup_steps=1, min_ratio=bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"cycle_steps": 0}, "cycle_steps=0"),
        ({"cycle_mult": 0}, "cycle_mult=0"),
        ({"cycle_mult": 1.5}, "cycle_mult=1.5"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_ratio": 2}, "min_ratio=2"),
    ],
)
def test_cosine_restarts_names_the_bad_setting(bad, message):
    with pytest.raises(UsageError, match=message):
        CosineRestarts(**{"cycle_steps": 3, **bad})


@pytest.mark.parametrize("cls", [WarmupStableDecay, PowerDecay])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"decay_steps": 0}, "decay_steps=0"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5"),
        ({"decay_fraction": math.nan}, "decay_fraction=nan"),
        ({"decay_start": -1}, "decay_start=-1"),
        ({"decay_steps": 3, "decay_start": 3}, "decay_steps and decay_start are both given"),
    ],
)
def test_a_decay_names_the_bad_setting(cls, bad, message):
    with pytest.raises(UsageError, match=rf"{cls.__name__}\b.*{message}"):
        cls(warmup_steps=1, **bad)


def test_a_shape_that_is_not_known_is_refused():
    with pytest.raises(UsageError, match="decay_shape='square': give one of linear, cosine, 1-sqrt"):
        WarmupStableDecay(warmup_steps=1, decay_shape="square")


@pytest.mark.parametrize("bad", [0, -1.2, math.nan, math.inf, True, "2"])
def test_a_power_that_is_no_number_above_0_is_refused(bad):
    with pytest.raises(UsageError, match=r"^PowerDecay\.power=.*: give a number above 0"):
        PowerDecay(warmup_steps=1, power=bad)


@pytest.mark.parametrize("cls", [WarmupStableDecay, PowerDecay])
@pytest.mark.parametrize(
    ("decay", "message"),
    [
        ({"decay_steps": 6}, "starts at step 4, before warmup_steps=5"),
        ({"decay_start": 10}, r"starts at step 10, not before trainer\.max_steps=10"),
        ({"decay_fraction": 0.0}, "starts at step 10, not before"),
    ],
)
def test_a_decay_that_does_not_fit_the_run_is_refused(cls, decay, message):
    with pytest.raises(UsageError, match=rf"{cls.__name__}: .*{message}"):
        cls(warmup_steps=5, **decay).check(10)


def test_every_refusal_is_one_line():
    for call in (
        lambda: WarmupCosine(warmup_steps=-1),
        lambda: WarmupCosine(warmup_steps=5).check(5),
        lambda: WarmupCosine(warmup_steps=5).check(None),
        lambda: WarmupStableDecay(warmup_steps=5, decay_steps=6).check(10),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_schedule_is_frozen_and_named_by_keyword_only():
    schedule = WarmupCosine(warmup_steps=1)
    with pytest.raises(AttributeError):
        schedule.warmup_steps = 2
    with pytest.raises(TypeError):
        WarmupCosine(1)


def test_a_curve_of_ones_own_needs_only_lr():
    class Halving(Schedule):
        def lr(self, peak, step, total_steps):
            return peak / 2**step

    Halving().check(None)
    assert Halving().factor(2, None) == 0.25
    with pytest.raises(TypeError):
        Schedule()
