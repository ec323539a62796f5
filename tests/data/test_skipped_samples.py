"""Samples to pass over: the arithmetic against a list, bad ranges, and the rows that a data module then serves."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._errors import UsageError
from lightning_tricks._samples import in_words
from lightning_tricks.data import TokenData
from lightning_tricks.data.skipped_samples import SkippedSamples


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), max_size=6), st.integers(0, 60))
def test_positions_and_indices_are_those_of_a_list_without_the_skipped_ones(ranges, position):
    pairs = [[first, first + more] for first, more in ranges]
    left = [p for p in range(200) if not any(first <= p <= last for first, last in pairs)]
    skipped = SkippedSamples(pairs)
    assert skipped.positions(np.arange(len(left) - 90)).tolist() == left[:-90]
    assert skipped.index(position) == sum(p < position for p in left)
    runs = skipped.runs(5, 30)
    assert [p for first, last in runs for p in range(first, last + 1)] == left[5:35]
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs))


def test_the_runs_are_written_as_the_option_takes_them():
    assert in_words([(6496, 6503), (6510, 6510)]) == "[[6496, 6503], [6510, 6510]]"


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
