"""Which rows a step takes, as arithmetic: the same for every split of the global batch."""

from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data.cursor import ENDLESS, DataCursor, first_rows, steps_to_come
from lightning_tricks.data.order import SkippedSamples

NONE = SkippedSamples(None)


def rows_of_steps(start, steps, micro_batches, size, world):
    """The set of rows of each step, over all ranks."""
    result = [set() for _ in range(steps)]
    for rank in range(world):
        firsts = first_rows(start, steps, micro_batches, size, rank, world)
        assert len(firsts) == steps * micro_batches
        for number, first in enumerate(firsts):
            rows = set(range(first, first + size))
            assert not rows & result[number // micro_batches]
            result[number // micro_batches] |= rows
    return result


def test_two_processes_by_two_micro_batches_by_hand():
    # global batch of 8 rows, step 5 starts at row 40
    assert list(first_rows(40, 2, 2, 2, rank=0, world=2)) == [40, 44, 48, 52]
    assert list(first_rows(40, 2, 2, 2, rank=1, world=2)) == [42, 46, 50, 54]


@given(
    st.integers(0, 10**12),
    st.integers(1, 4),
    st.sampled_from([(1, 1, 8), (2, 1, 4), (1, 4, 2), (2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 8, 1)]),
)
def test_a_step_takes_the_same_rows_however_the_global_batch_is_split(start, steps, split):
    world, micro_batches, size = split
    expected = [set(range(start + 8 * step, start + 8 * (step + 1))) for step in range(steps)]
    assert rows_of_steps(start, steps, micro_batches, size, world) == expected


def trainer(**values):
    automatic = values.pop("automatic", True)
    defaults = {
        "global_step": 0,
        "max_steps": -1,
        "max_epochs": -1,
        "accumulate_grad_batches": 1,
        "overfit_batches": 0.0,
        "distributed_sampler_kwargs": None,
        "limit_train_batches": 1.0,
        "lightning_module": SimpleNamespace(automatic_optimization=automatic),
        "fit_loop": loop(0, 0),
    }
    return SimpleNamespace(**(defaults | values))


def loop(ready, completed):
    def tracker():
        return SimpleNamespace(ready=ready, started=ready, processed=ready, completed=completed)

    progress = SimpleNamespace(current=tracker(), total=tracker(), is_last_batch=False)
    return SimpleNamespace(restarting=True, epoch_loop=SimpleNamespace(batch_progress=progress))


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"max_steps": 10, "global_step": 4}, 6),
        ({"max_steps": 10, "global_step": 10}, 0),
        ({"max_steps": 0}, 0),
        ({"max_epochs": 3, "global_step": 0}, 7),
        ({"max_epochs": 3, "global_step": 16}, 5),
        ({}, ENDLESS),
        ({"max_steps": 10, "automatic": False}, ENDLESS),
    ],
)
def test_the_loader_knows_how_many_steps_are_to_come(values, steps):
    assert steps_to_come(trainer(**values), pass_micro_batches=7) == steps


def cursor(size=2):
    return DataCursor(size, {"seed": 0}, NONE)


def test_rows_are_counted_by_step_and_global_batch():
    ranks = {"rank": 1, "num_replicas": 4}
    now = trainer(global_step=10, accumulate_grad_batches=3, distributed_sampler_kwargs=ranks)
    assert cursor().rows(now) == 10 * 2 * 3 * 4
    span = {"step": 0, "sample": 0, "rows": 24, "skipped": []}
    assert cursor().state_dict(now) == {"samples": 240, "micro_batches": 3, "history": [span], "seed": 0}


def test_after_a_change_of_the_global_batch_the_rows_before_it_still_count():
    resumed = cursor(size=5)
    resumed.load_state_dict({"samples": 240, "micro_batches": 3, "seed": 0, "history": []})
    now = trainer(global_step=10, fit_loop=loop(30, 29))
    resumed.begin(now)
    assert resumed.rows(now) == 240
    now.global_step = 12
    assert resumed.rows(now) == 250
    assert list(islice(resumed.first_rows(now, windows=100), 3)) == [250, 255, 260]


def counters(now):
    progress = now.fit_loop.epoch_loop.batch_progress
    assert vars(progress.current) == vars(progress.total)
    return tuple(vars(progress.current).values())


@pytest.mark.parametrize(
    ("ready", "completed", "saved", "now", "expected"),
    [
        (8, 7, 4, 4, (8, 8, 8, 7)),  # saved at the end of a window, before the batch was counted
        (8, 8, 4, 4, (8, 8, 8, 8)),  # saved after validation
        (10, 9, 4, 4, (8, 8, 8, 8)),  # saved in mid-window
        (3, 2, 4, 4, (0, 0, 0, 0)),  # saved in the first window
        (8, 7, 4, 2, (4, 4, 4, 3)),  # the run now accumulates less
        (3, 2, 1, 4, (12, 12, 12, 11)),  # the run now accumulates more
    ],
)
def test_counters_go_back_to_the_last_whole_step(ready, completed, saved, now, expected):
    resumed = trainer(max_steps=100, accumulate_grad_batches=now, fit_loop=loop(ready, completed))
    place = cursor()
    place.load_state_dict({"samples": 0, "micro_batches": saved, "seed": 0, "history": []})
    place.begin(resumed)
    assert counters(resumed) == expected


def test_a_checkpoint_of_other_data_is_aligned_and_counted_in_today_s_global_batch():
    now = trainer(global_step=2, max_steps=100, accumulate_grad_batches=4, fit_loop=loop(10, 9))
    place = cursor()
    place.begin(now)
    assert counters(now) == (8, 8, 8, 8)
    assert place.rows(now) == 2 * 4 * 2


def test_the_last_batch_of_a_shorter_run_is_not_the_last_of_a_longer_one():
    for max_steps, limit, ready, expected in ((20, 1.0, 8, False), (2, 1.0, 8, True), (20, 6, 6, True)):
        now = trainer(global_step=2, max_steps=max_steps, limit_train_batches=limit, accumulate_grad_batches=4)
        now.fit_loop = loop(ready, ready - 1)
        now.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        cursor().begin(now)
        assert now.fit_loop.epoch_loop.batch_progress.is_last_batch is expected
        assert counters(now) == (ready, ready, ready, ready - 1)


def test_a_loaded_cursor_counts_for_one_fit_alone():
    def run(step, micro_batches=1):
        now = trainer(global_step=step, accumulate_grad_batches=micro_batches)
        now.fit_loop.restarting = False  # as Lightning says where the checkpoint's epoch was over
        return now

    cursor = DataCursor(2, {}, NONE)
    cursor.load_state_dict({"samples": 40, "micro_batches": 1, "history": []})
    cursor.begin(resumed := run(10))
    assert cursor.rows(resumed) == 40
    cursor.begin(second := run(13))  # a second fit goes on with new rows
    assert cursor.rows(second) == 46
    cursor.begin(fresh := run(0, micro_batches=3))
    assert cursor.rows(fresh) == 0
    assert cursor.history(fresh).state() == [{"step": 0, "sample": 0, "rows": 6, "skipped": []}]


def test_a_step_names_its_samples_past_those_that_are_skipped():
    now = trainer(global_step=2, accumulate_grad_batches=2)
    place = DataCursor(3, {}, SkippedSamples([[14, 15], [18, 30]]))
    assert place.step_samples(now) == [(12, 13), (16, 17), (31, 32)]  # the third step of six
    now.overfit_batches = 1
    assert place.step_samples(now) is None


def test_a_resumed_run_may_skip_other_samples():
    before = DataCursor(2, {}, SkippedSamples([[1, 4]]))
    state = before.state_dict(trainer(global_step=3))
    assert state["samples"] == 10  # 0, 5, 6, 7, 8, 9 are done
    resumed = DataCursor(2, {}, SkippedSamples([[3, 6], [11, 12]]))
    resumed.load_state_dict(state)
    now = trainer(global_step=3, fit_loop=loop(3, 3))
    resumed.begin(now)
    assert resumed.step_samples(now) == [(10, 10), (13, 13)]


def test_a_number_of_micro_batches_that_changes_with_the_epoch_is_refused():
    now = trainer(callbacks=[GradientAccumulationScheduler({0: 4})], fit_loop=loop(0, 0))
    now.fit_loop.restarting = False
    cursor().begin(now)
    now.callbacks = [GradientAccumulationScheduler({0: 1, 2: 4})]
    with pytest.raises(UsageError, match=r"scheduling=\{0: 1, 2: 4\}\): rows would be left out .* BatchSizeWarmup"):
        cursor().begin(now)
