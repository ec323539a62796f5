"""The breakdown of a run's wall time: intervals, shares and texts worked out by hand; percentages that add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.accounting.goodput import (
    PARTS,
    breakdown,
    covered,
    duration,
    fractions,
    lost_to_restart,
    tenths_of_percent,
)

TIMES = st.floats(0, 1e6)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=5)


def test_intervals_that_overlap_count_once():
    # 10-20 and 15-30 are 20 seconds; 40-50 is cut at 45, 0-5 lies before
    assert covered([(40, 50), (15, 30), (10, 20), (0, 5), (12, 13)], 8, 45) == 25
    assert covered([(10, 20)], 15, 12) == 0
    assert covered([], 0, 10) == 0


def test_what_a_restart_costs_by_hand():
    # saved at 100, which took until 103; killed at 160; from 170 to 200 again, without a save; started at 230
    processes, saves = [(0, 160), (170, 200)], [(50, 52), (99, 103), (120, 124)]
    assert lost_to_restart(100, 230, processes, saves) == {"checkpoint": 3, "lost": 57 + 30, "down": 10 + 30}
    # going on from the checkpoint of 120 takes the rest of its save alone
    assert lost_to_restart(121, 230, processes, saves) == {"checkpoint": 3, "lost": 36 + 30, "down": 40}


def test_without_a_history_the_time_since_the_save_is_down_time():
    assert lost_to_restart(100, 230, [], []) == {"checkpoint": 0, "lost": 0, "down": 130}


def test_a_process_that_started_before_the_save_has_lost_nothing():
    assert lost_to_restart(100, 90, [(0, 200)], [(99, 103)]) == {"checkpoint": 0, "lost": 0, "down": 0}


@given(TIMES, TIMES, INTERVALS, INTERVALS)
def test_what_is_lost_adds_up_to_the_time_since_the_save(saved_at, started_at, processes, saves):
    found = lost_to_restart(saved_at, started_at, processes, saves)
    assert math.fsum(found.values()) == pytest.approx(max(started_at - saved_at, 0.0), abs=1e-6)
    assert min(found.values()) >= -1e-6


@given(st.lists(st.floats(0, 1e7), min_size=len(PARTS), max_size=len(PARTS)))
def test_shares_add_up(values):
    seconds = dict(zip(PARTS, values, strict=True))
    if math.fsum(values) < 1e-6:
        return
    assert math.fsum(fractions(seconds).values()) == pytest.approx(1.0, abs=1e-12)
    found = tenths_of_percent(seconds)
    assert sum(found.values()) == 1000
    assert all(abs(found[part] - 1000 * share) < 1 + 1e-9 for part, share in fractions(seconds).items())


def test_no_time_has_no_shares():
    nothing = dict.fromkeys(PARTS, 0.0)
    assert fractions(nothing) == nothing
    assert breakdown(nothing) == "wall 0.0 s = steps 0.0 % + other 0.0 %"


def test_a_breakdown_by_hand():
    # 11520 seconds: three parts of 1/3 of 9.9 % round to 3.3 % each
    seconds = dict.fromkeys(PARTS, 0.0) | {"steps": 10380, "validation": 380, "lost": 380, "down": 380, "data": 0.5}
    assert breakdown(seconds) == (
        "wall 3 h 12 min = steps 90.1 % + validation 3.3 % + lost work 3.3 % + down time 3.3 % + other 0.0 %"
    )


def test_percentages_are_rounded_so_that_they_add_up():
    thirds = dict.fromkeys(PARTS, 0.0) | {"steps": 1, "data": 1, "other": 1}
    assert breakdown(thirds) == "wall 3.0 s = steps 33.4 % + data wait 33.3 % + other 33.3 %"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (5.34, "5.3 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (61, "1 min 1 s"),
        (3599.4, "59 min 59 s"), (3599.6, "1 h 0 min"), (11520, "3 h 12 min"), (86369, "23 h 59 min"),
        (86371, "1 d 0 h"), (200000, "2 d 8 h"),
    ],
)  # fmt: skip
def test_a_time_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text
