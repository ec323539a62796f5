"""The order: a shuffle that is a bijection, differs by seed and epoch, and needs no memory."""

import itertools

import numpy as np
import pytest
import torch
from harness.windows import WindowOrder
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.run_facts import samples_in_words
from lightning_tricks.data import TokenData, permute
from lightning_tricks.data.order import SkippedSamples, derive_key


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_for_every_n_and_key(n, key):
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(st.integers(1, 2**40), st.data())
def test_permute_stays_inside_and_answers_one_index_as_it_answers_many(n, data):
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
    out = permute(index, n, 7)
    assert ((out >= 0) & (out < n)).all()
    assert [int(permute(i, n, 7)) for i in index] == out.tolist()


def test_permute_shuffles_well_enough():
    n = 10_000
    out = permute(np.arange(n), n, 1)
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.05
    steps = np.abs(np.diff(out))
    # the mean distance of two independent positions is a third of the range
    assert steps.mean() == pytest.approx(n / 3, rel=0.05)
    assert (steps == 1).mean() < 0.01


def test_each_seed_and_epoch_has_its_own_key():
    keys = {derive_key(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(keys) == 10_000
    assert derive_key(1, 23) != derive_key(12, 3)


def test_the_order_never_changes():
    """A checkpoint of today must find its rows tomorrow."""
    assert permute(np.arange(8), 1000, 42).tolist() == [716, 236, 407, 326, 72, 993, 231, 870]
    assert WindowOrder(1000, 10, seed=5).starts(np.array([0, 1, 98, 99, 200])).tolist() == [125, 875, 585, 801, 956]


@given(st.integers(1, 50), st.integers(1, 2000), st.integers(0, 5))
def test_a_pass_visits_every_window_once_and_no_target_twice(seq_len, more, epoch):
    tokens = seq_len + more
    order = WindowOrder(tokens, seq_len, seed=0)
    starts = np.sort(order.starts(np.arange(order.windows) + epoch * order.windows))
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= tokens
    assert (np.diff(starts) == seq_len).all()
    assert tokens - 1 - order.windows * seq_len <= 2 * seq_len - 1


def test_passes_differ_in_order_and_in_where_the_cuts_are():
    order = WindowOrder(10_001, 100, seed=0)
    passes = [order.starts(np.arange(order.windows) + epoch * order.windows) for epoch in range(5)]
    assert len({int(starts[0] % 100) for starts in passes}) > 1
    assert len({tuple(starts // 100) for starts in passes}) == 5
    other = WindowOrder(10_001, 100, seed=1).starts(np.arange(order.windows))
    assert (other != passes[0]).any()


def test_one_call_may_cross_from_one_pass_into_the_next():
    order = WindowOrder(1000, 10, seed=0)
    both = order.starts(np.arange(order.windows - 2, order.windows + 2))
    assert both.tolist() == [int(order.starts(np.array([p]))[0]) for p in range(order.windows - 2, order.windows + 2)]


def test_a_text_as_long_as_one_row_and_its_target_is_enough():
    assert WindowOrder(11, 10, seed=0).starts(np.arange(3)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="10 tokens hold no window"):
        WindowOrder(10, 10, seed=0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=6), st.integers(0, 60))
def test_positions_and_rows_are_those_of_a_list_without_the_skipped_ones(ranges, position):
    pairs = [[first, first + more] for first, more in ranges]
    left = [p for p in range(200) if not any(first <= p <= last for first, last in pairs)]
    skipped = SkippedSamples(pairs)
    assert skipped.positions(np.arange(len(left) - 90)).tolist() == left[:-90]
    assert skipped.row(position) == sum(p < position for p in left)
    runs = skipped.runs(5, 30)
    assert [p for first, last in runs for p in range(first, last + 1)] == left[5:35]
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs))


def test_the_runs_are_written_as_the_option_takes_them():
    assert samples_in_words([(6496, 6503), (6510, 6510)]) == "[[6496, 6503], [6510, 6510]]"


@pytest.mark.parametrize("wrong", [[5, 3], [-1, 2], [1], [1, 2, 3], 7, "1-2", [1.0, 2], [True, 2]])
def test_no_range(wrong):
    with pytest.raises(UsageError, match=r"^skip_samples: .* is no range of sample positions; give \[first, last\]"):
        SkippedSamples([[0, 1], wrong])


def test_a_data_module_passes_over_them(write_shard):
    def rows(**options):
        data = TokenData(train=str(write_shard(range(1000))), seq_len=9, micro_batch_size=4, **options)
        data.setup()
        return torch.cat([batch["input_ids"] for batch, _ in zip(data.train_dataloader(), range(10), strict=False)])

    all_rows, some = rows(), rows(skip_samples=[[2, 3], [9, 15]])
    assert torch.equal(some[:31], torch.cat([all_rows[:2], all_rows[4:9], all_rows[16:]])[:31])
