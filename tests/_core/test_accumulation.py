"""How many micro-batches each step has, as arithmetic, and an int that counts from the first one of the step."""

import copy
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.accumulation import Accumulation, MicroBatches, micro_batches_in_step

PLAN = Accumulation((0, 3, 5), (1, 2, 4))
PLANS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda stages: Accumulation(
        tuple(sum(length for length, _ in stages[:number]) for number in range(len(stages))),
        tuple(size for _, size in stages),
    )
)


def test_the_stages_by_hand():
    assert [PLAN.at(step) for step in range(7)] == [1, 1, 1, 2, 2, 4, 4]
    assert [PLAN.before(step) for step in range(7)] == [0, 1, 2, 3, 5, 7, 11]
    assert PLAN.whole_steps(2, 6) == 3  # 1 + 2 + 2, and 1 of 4
    assert PLAN.steps_of_epoch(2, 6) == 4


@given(PLANS, st.integers(0, 30), st.integers(0, 60))
def test_sums_and_their_inverse_agree_with_counting(plan, first, micro_batches):
    assert plan.before(first) == sum(plan.at(step) for step in range(first))
    steps = plan.whole_steps(first, micro_batches)
    assert plan.before(first + steps) - plan.before(first) <= micro_batches
    assert plan.before(first + steps + 1) - plan.before(first) > micro_batches


def test_the_remainder_counts_from_the_first_micro_batch_of_the_step():
    value = MicroBatches(4, first=3, step=2, final=8)
    assert [count % value for count in range(3, 8)] == [0, 1, 2, 3, 0]
    assert (value, value * 2, 6 / value, f"{value}") == (4, 8, 1.5, "4")
    assert 5 % MicroBatches(4, first=None, step=2, final=8) == 0


@pytest.mark.parametrize(
    ("value", "in_step"),
    [
        (MicroBatches(4, first=3, step=2, final=8), 2),
        (MicroBatches(4, first=3, step=1, final=8), 0),  # the step is over
        (MicroBatches(4, first=None, step=2, final=8), 0),
        (4, 0),  # without BatchSizeWarmup
    ],
)
def test_the_micro_batches_of_an_unfinished_step_count_from_its_first(value, in_step):
    trainer = SimpleNamespace(accumulate_grad_batches=value, global_step=2)
    assert micro_batches_in_step(trainer, ready=5) == in_step


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_is_a_plain_int(copied):
    assert type(copied([MicroBatches(4, 3, 2, 8)])[0]) is int
