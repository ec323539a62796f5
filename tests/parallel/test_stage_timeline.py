"""Pipeline schedules on paper: each pass once and after what it needs, known bubbles and activations, the picture."""

import re
from collections import Counter
from itertools import pairwise
from typing import get_args

import pytest

from lightning_tricks.parallel.pipeline import PipelineSchedule
from lightning_tricks.parallel.stage_timeline import drawn, most_held, timeline, waiting


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 7), (4, 8)])
def test_each_pass_comes_once_and_after_what_it_needs(schedule, ranks, micro_batches):
    if schedule.startswith("Interleaved") and micro_batches % ranks:
        micro_batches = 2 * ranks  # which torch wants
    acts = timeline(schedule, ranks, micro_batches)
    ends = {}
    for own in acts:
        for act in own:
            assert act.end - act.begin == {"F": 1, "B": 2, "I": 1, "W": 1}[act.kind]
            assert (act.kind, act.stage, act.micro_batch) not in ends
            ends[act.kind, act.stage, act.micro_batch] = act.end
        assert all(before.end <= after.begin for before, after in pairwise(own))
    stages = {stage for _, stage, _ in ends}
    whole = Counter({(stage, number): 1 for stage in stages for number in range(micro_batches)})
    assert Counter((stage, number) for kind, stage, number in ends if kind == "F") == whole
    assert Counter((stage, number) for kind, stage, number in ends if kind in "BI") == whole
    assert {key[1:] for key in ends if key[0] == "I"} == {key[1:] for key in ends if key[0] == "W"}
    for own in acts:
        for kind, stage, number, begin, _ in own:
            of_inputs = [ends[k, stage + 1, number] for k in "BI" if (k, stage + 1, number) in ends]
            needs = {"F": [ends["F", stage - 1, number]] if stage else [], "W": [ends.get(("I", stage, number), 0)]}
            assert all(end <= begin for end in needs.get(kind, [ends["F", stage, number], *of_inputs]))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 32), (4, 4)])
def test_the_bubble_and_what_is_held_are_those_of_the_papers(ranks, micro_batches):
    # GPipe and 1F1B wait (P - 1) / (M + P - 1) of the time; 1F1B holds at most as many micro-batches as stages follow
    for schedule in ("GPipe", "1F1B"):
        acts = timeline(schedule, ranks, micro_batches)
        assert waiting(acts) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
        held = [most_held(own, {rank: 1}) for rank, own in enumerate(acts)]
        ahead = [micro_batches if schedule == "GPipe" else min(micro_batches, ranks - rank) for rank in range(ranks)]
        assert held == ahead
    two = timeline("1F1B", ranks, micro_batches)
    assert [most_held(own, {rank: 5}) for rank, own in enumerate(two)] == [5 * n for n in ahead]


def test_the_picture():
    assert drawn(timeline("1F1B", 2, 3), 80).splitlines() == [
        "rank 0 01..bb2bb.bb",
        "rank 1 .0bb1bb2bb..",
    ]
    halves = [
        "rank 0 0.b2bb",
        "rank 1 .b1bb.",
        "a column stands for 2 units of time; a forward pass takes one",
    ]
    assert drawn(timeline("1F1B", 2, 3), 13).splitlines() == halves


def test_a_picture_with_few_columns_shows_both_halves_of_the_acts():
    rows = drawn(timeline("1F1B", 4, 64), 7 + 40).splitlines()[:4]  # a sixth of the columns, so every sixth unit
    assert all("b" in row[7:] and re.search(r"\d", row[7:]) for row in rows)
