"""Mixtures: shares within the bound at every prefix, indices without gaps, ends and changes, all as pure functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.data.mixture import UNIT, Mixture, Resolved, Stage, best_tree, tree_bound, whole_weights

EXPECTED = (
    [0, 1, 0, 1, 2, 0, 1, 0, 0, 1, 0, 2, 0, 2, 2, 1, 0, 1, 0, 1],
    [0, 0, 1, 1, 0, 2, 2, 3, 4, 3, 5, 1, 6, 2, 3, 4, 7, 5, 8, 6],
)
WEIGHTS = st.lists(st.floats(0.001, 0.9), min_size=1, max_size=35)


def named(weights):
    return {f"s{number}": float(weight) for number, weight in enumerate(weights)}


def deviation(mixture, rows):
    """Largest distance of a source's rows from its share, at any prefix; asserts indices of 0, 1, 2, ... for each.

    The share of a segment is of its rows; where a source has ended, the others share what it took too much.
    """
    source, index = mixture.rows(np.arange(rows))
    numbers = np.arange(len(mixture.names))
    for number in numbers:
        own = index[source == number]
        assert (own == np.arange(len(own))).all()
    taken, share, largest = np.zeros(len(numbers)), np.zeros(len(numbers)), 0.0
    segments = mixture.segments()
    for segment, stop in zip(segments, [*(s.position for s in segments[1:]), rows], strict=True):
        first, last = segment.position, min(stop, rows)
        if first >= last:
            break
        weights = np.array([segment.weights.get(name, 0) for name in mixture.names]) / UNIT
        gone = weights == 0
        share = np.where(gone, taken, share - np.where(gone, taken - share, 0).sum() * weights)
        for number in numbers[~gone]:
            own = taken[number] + np.cumsum(source[first:last] == number)
            due = share[number] + weights[number] * np.arange(1, last - first + 1)
            largest = max(largest, float(np.abs(own - due).max()))
        taken += np.bincount(source[first:last], minlength=len(numbers))
        share = share + weights * (last - first)
    return largest


@given(WEIGHTS)
def test_whole_weights_have_their_sum_and_are_within_a_millionth(weights):
    whole = whole_weights(named(weights))
    assert sum(whole.values()) == UNIT
    assert all(
        abs(number - weight / sum(weights) * UNIT) < 1 for number, weight in zip(whole.values(), weights, strict=True)
    )


def test_tiny_weights_keep_a_millionth_and_zero_is_none():
    whole = whole_weights({"big": 1.0, "none": 0.0, **dict.fromkeys(map(str, range(20)), 1e-12)})
    assert whole["big"] == UNIT - 20
    assert whole["none"] == 0
    assert set(whole.values()) == {UNIT - 20, 0, 1}


@pytest.mark.parametrize(
    ("weights", "bound"),
    [
        ([1], 1),
        ([3, 7], 1),
        ([2, 3, 5], 1 + 3 / 5),  # (2, 3) below the root, 5 beside: 3 of the weight 5
        ([1, 1, 1, 1], 1 + 1 / 2),
    ],
)
def test_the_bound_by_hand(weights, bound):
    assert tree_bound(best_tree(weights), weights) == pytest.approx(bound)


@settings(max_examples=30)
@given(WEIGHTS, st.integers(0, 2**32))
def test_every_prefix_is_within_the_bound(weights, seed):
    mixture = Mixture([Stage(0, named(weights))], {}, seed)
    assert deviation(mixture, 3000) < mixture.bound <= (1 if len(weights) <= 2 else 3.5)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 35))
def test_changes_keep_the_bound(data, number):
    weights = st.lists(st.floats(0.001, 0.9), min_size=number, max_size=number).map(named)
    positions = [0, *sorted(data.draw(st.sets(st.integers(1, 2999), max_size=20)))]
    mixture = Mixture([Stage(position, data.draw(weights)) for position in positions], {}, 3)
    assert deviation(mixture, 3000) < mixture.bound


def test_each_change_adds_a_row_to_the_bound_and_one_row_for_all_would_not_do():
    random = np.random.default_rng(20)
    stages = [Stage(position, named(np.where(random.random(19) < 0.5, 0.001, 0.9))) for position in range(0, 2200, 100)]
    mixture, bounds = Mixture(stages, {}, 3), [Mixture([stage], {}, 3).bound for stage in stages]
    assert max(bounds) + 1 < deviation(mixture, 3000) < mixture.bound == max(bounds) + 21


@pytest.mark.parametrize("number", [2, 7, 35])
def test_a_million_rows_with_two_annealing_points_and_twenty_changes(number):
    random = np.random.default_rng(number)

    def drawn():
        return named(np.clip(np.exp(random.normal(0, 1.5, number)) / number, 0.001, 0.9))

    rows, stages = 1_000_000, [Stage(position, drawn()) for position in (0, 600_000, 900_000)]
    mixture = Mixture(stages, {}, 1)
    assert deviation(mixture, rows) < mixture.bound
    for since in np.sort(random.integers(1, rows, 20)).tolist():  # each resume has other weights from there on
        mixture = Mixture([*stages[:1], Stage(since, drawn()), *stages[1:]], {}, 1, mixture.segments(), since)
    assert len(mixture.segments()) >= 21
    assert deviation(mixture, rows) < mixture.bound


@pytest.mark.parametrize("world", [2, 4, 8])
def test_no_rank_sees_another_share_than_by_chance(world):
    """A chi-squared of the counts of ranks: an even spacing would give a rank one source of two alone."""
    weights = named([0.5, 0.25, 0.2, 0.05])
    source, _ = Mixture([Stage(0, weights)], {}, 0).rows(np.arange(80_000))
    counts = np.array([np.bincount(source[rank::world], minlength=4) for rank in range(world)])
    expected = np.array([*weights.values()]) * 80_000 / world
    # with rows drawn freely, the mean would be 3 (world - 1) with a deviation of sqrt(6 (world - 1))
    assert ((counts - expected) ** 2 / expected).sum() < 3 * (world - 1) + 5 * (6 * (world - 1)) ** 0.5


def test_no_period_is_visible():
    source, _ = Mixture([Stage(0, named([1, 1]))], {}, 0).rows(np.arange(1 << 16))
    power = np.abs(np.fft.rfft(source - source.mean())) ** 2
    assert power.max() < 40 * power.mean()  # 32,768 times, where each second row is of the same source


@settings(max_examples=30)
@given(st.data(), st.integers(1, 12))
def test_sources_end_where_their_rows_do_and_all_rows_come(data, number):
    rows = {f"s{n}": data.draw(st.integers(1, 200)) for n in range(number)}
    mixture = Mixture([Stage(0, {name: data.draw(st.floats(0.01, 1)) for name in rows})], rows, 5)
    assert mixture.end == sum(rows.values())
    assert mixture.counts(mixture.end) == rows
    assert deviation(mixture, mixture.end) < mixture.bound


@settings(max_examples=30)
@given(st.data(), st.integers(0, 400))
def test_a_resume_with_the_same_recipe_is_the_same_function(data, since):
    stages = [Stage(position, {"a": weight, "b": 1, "c": 0.1}) for position, weight in ((0, 3), (100, 1), (300, 0.1))]
    limits = {"a": data.draw(st.integers(1, 300)), "c": data.draw(st.integers(1, 30))}
    mixture = Mixture(stages, limits, 1)
    again = Mixture(stages, limits, 1, mixture.segments(), since)
    assert again.segments() == mixture.segments()


def test_a_source_that_grew_goes_on_from_the_resume():
    stages = [Stage(0, {"a": 1, "b": 1})]
    short = Mixture(stages, {"a": 10}, 1)
    ended = short.segments()[1].position
    longer = Mixture(stages, {"a": 20}, 1, short.segments(), 100)
    assert [segment.position for segment in longer.segments()][:3] == [0, ended, 100]
    source, index = longer.rows(np.arange(200))
    assert (source[ended:100] == 1).all()
    assert index[source == 0].tolist() == list(range(20))


def test_rows_are_those_of_today_for_ever():
    """A checkpoint of today must find its rows tomorrow."""
    mixture = Mixture([Stage(0, {"a": 3, "b": 2, "c": 1}), Stage(12, {"a": 1, "b": 1, "c": 1})], {"c": 4}, 7)
    source, index = mixture.rows(np.arange(20))
    assert source.tolist() == EXPECTED[0]
    assert index.tolist() == EXPECTED[1]


def test_a_state_is_plain_and_gives_the_same_mixture():
    mixture = Mixture([Stage(0, {"a": 3, "b": 2})], {"b": 10}, 7)
    assert Mixture.of_state(mixture.state()) == mixture.segments()
    assert mixture.state()[0] == {"position": 0, "weights": {"a": 600_000, "b": 400_000}, "seed": 7}
    assert Resolved(**mixture.state()[0]) == mixture.segments()[0]
