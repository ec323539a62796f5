"""The samples of each step, over changes of the global batch, of the skipped samples, and of the data."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._core.errors import UsageError
from lightning_tricks.data import ShardWriter
from lightning_tricks.data import cursor as module
from lightning_tricks.data.cursor import BatchHistory, DataCursor, Span
from lightning_tricks.data.order import SkippedSamples
from lightning_tricks.data.shards import TokenStream

PARTS = st.lists(
    st.tuples(
        st.integers(1, 5),  # steps until the next checkpoint
        st.integers(1, 4),  # rows of a micro-batch
        st.integers(1, 3),  # micro-batches
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=3),  # skipped from this part on
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(module, "steps_done", lambda trainer: trainer.step)
    monkeypatch.setattr(module, "is_restarting", lambda trainer: trainer.restarts)
    monkeypatch.setattr(module, "align_accumulation", lambda *_: None)


def trainer(**values):
    defaults = {"step": 0, "accumulate_grad_batches": 1, "overfit_batches": 0, "distributed_sampler_kwargs": None}
    return SimpleNamespace(**(defaults | {"restarts": False} | values))


@given(PARTS)
def test_the_last_checkpoint_tells_the_samples_of_every_step_as_the_runs_took_them(parts):
    state, taken, done = None, [], 0
    for steps, size, micro_batches, skipped in parts:
        cursor = DataCursor(size, {"seed": 0}, SkippedSamples([[a, a + more] for a, more in skipped]))
        if state is not None:
            cursor.load_state_dict(state)
        now = trainer(step=done, accumulate_grad_batches=micro_batches, restarts=state is not None)
        cursor.begin(now)
        for _ in range(steps):
            taken.append(cursor.step_samples(now))
            now.step += 1
        state, done = cursor.state_dict(now), now.step
    assert [cursor.samples_of_step(step, state) for step in range(done)] == taken


@pytest.mark.parametrize(
    ("micro_batches", "line"), [(2, []), (3, ["From step 4 on, a step has 6 rows; in the checkpoint's run it had 4"])]
)
def test_a_resume_with_another_batch_says_so_in_one_line(micro_batches, line, monkeypatch):
    said = []
    monkeypatch.setattr(module, "rank_zero_info", said.append)
    first, now = DataCursor(4, {"seed": 0}, SkippedSamples([])), trainer()
    first.begin(now)
    now.step = 4
    second = DataCursor(2, {"seed": 0}, SkippedSamples([]))  # 2 micro-batches of 2 are the same batch
    second.load_state_dict(first.state_dict(now))
    second.begin(trainer(step=4, accumulate_grad_batches=micro_batches, restarts=True))
    assert said == line


def test_a_run_that_never_changes_has_one_span_however_often_it_resumes():
    state, skipped = None, [[3, 5], [40, 47]]
    for done in (0, 4, 8):
        cursor = DataCursor(2, {}, SkippedSamples(skipped))
        if state is not None:
            cursor.load_state_dict(state)
        now = trainer(step=done, accumulate_grad_batches=4, restarts=state is not None)
        cursor.begin(now)
        now.step = done + 4
        state = cursor.state_dict(now)
    assert state["history"] == [{"step": 0, "sample": 0, "rows": 8, "skipped": skipped}]


def test_steps_of_other_data_are_not_told():
    state = {"samples": 80, "micro_batches": 1, "history": [Span(0, 0, 8).__dict__], "seed": 1}
    cursor = DataCursor(8, {"seed": 0}, SkippedSamples(None))
    with pytest.raises(UsageError, match=r"other data settings \(seed 1 -> 0\): give the recipe"):
        cursor.samples_of_step(5, state)
    cursor.load_state_dict(state)
    now = trainer(step=10, restarts=True)
    with pytest.warns(UserWarning, match="other data settings"):
        cursor.begin(now)
    later = cursor.state_dict(now)
    assert later["history"] == [{"step": 10, "sample": 80, "rows": 8, "skipped": []}]
    assert cursor.samples_of_step(10, later) == [(80, 87)]
    with pytest.raises(UsageError, match=r"step=9: the run took these data from step 10 on \(before it, the run took"):
        cursor.samples_of_step(9, later)


def test_after_a_checkpoint_without_a_state_of_these_data_the_history_begins_there():
    cursor = DataCursor(8, {}, SkippedSamples(None))
    now = trainer(step=5, restarts=True)
    cursor.begin(now)
    assert cursor.state_dict(now)["history"] == [{"step": 5, "sample": 40, "rows": 8, "skipped": []}]
    now.step = 9
    cursor.begin(now)  # a second fit of the same Trainer
    assert cursor.state_dict(now)["history"] == [{"step": 5, "sample": 40, "rows": 8, "skipped": []}]


def test_while_overfitting_no_step_has_samples_of_its_own():
    state = DataCursor(8, {}, SkippedSamples(None)).state_dict(trainer(step=5, overfit_batches=2))
    assert state["history"] == []
    with pytest.raises(UsageError, match=r"step=3: the checkpoint does not tell the samples of any step"):
        BatchHistory.of_state(state["history"]).runs(3)


def test_a_token_belongs_to_the_document_after_the_end_of_text_tokens_before_it(tmp_path):
    with ShardWriter(tmp_path, "train", 256, shard_tokens=4) as writer:
        writer.append(np.array([5, 0, 6, 0, 7, 8, 0]))
    stream = TokenStream(sorted(tmp_path.glob("*.bin")))
    assert stream.count_before(0, [4, 0, 1, 2, 3, 6]) == [2, 0, 0, 1, 1, 2]
    assert stream.place(5) == (tmp_path / "train_000001.bin", 1)


def test_the_rows_of_the_first_steps_by_hand():
    history = BatchHistory([Span(0, 0, 8), Span(3, 24, 4), Span(5, 32, 16)])
    assert [history.rows(steps) for steps in (0, 2, 3, 4, 5, 7)] == [0, 16, 24, 28, 32, 64]
    assert BatchHistory([Span(2, 16, 8)]).rows(5) is None  # the steps before took other data
    assert BatchHistory().rows(5) is None
