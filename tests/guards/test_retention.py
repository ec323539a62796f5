"""Retention as a pure function: what it keeps and what it lets go, by hand and for any history of saves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.checkpoints.record import Record
from lightning_tricks.guards.checkpoint_folder import Retention, best_first, last_of, to_delete, to_make_room

RECORDS = st.builds(
    Record,
    step=st.integers(0, 50),
    number=st.integers(1, 10_000),
    finite=st.sampled_from([True, True, False, None]),
    score=st.none() | st.floats(),
    permanent=st.sampled_from([False, False, True]),
)
RETENTIONS = st.builds(Retention, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["min", "max"]))


def history(*records: Record) -> dict[str, Record]:
    """The records of a folder, by names that do not sort as the saves did."""
    return {f"step={record.step}.ckpt": record for record in reversed(records)}


@st.composite
def folders(draw):
    records = draw(st.lists(RECORDS, max_size=8, unique_by=(lambda r: r.step, lambda r: r.number)))
    return history(*records)


def keep(last=2, best=0, mode="min"):
    return Retention(last, best, mode)


def test_the_newest_stay_and_the_oldest_goes_first():
    records = history(*(Record(step, step // 10, True) for step in (10, 20, 30, 40)))
    assert to_delete(records, keep(2)) == ["step=10.ckpt", "step=20.ckpt"]
    assert last_of(records) == "step=40.ckpt"


def test_new_is_what_was_saved_last_and_not_the_highest_step():
    # the run had come to 300, went back to 100 and saved 200 again
    records = history(Record(100, 1, True), Record(300, 3, True), Record(200, 4, True))
    assert to_delete(records, keep(1)) == ["step=100.ckpt", "step=300.ckpt"]
    assert last_of(records) == "step=200.ckpt"


def test_a_run_of_nan_never_deletes_the_last_good_checkpoint():
    records = history(Record(10, 1, True), Record(20, 2, True), *(Record(10 * n, n, False) for n in range(3, 8)))
    assert to_delete(records, keep(2)) == [f"step={step}.ckpt" for step in (10, 30, 40, 50)]
    assert last_of(records) == "step=20.ckpt"


def test_where_nothing_is_finite_last_is_the_newest():
    assert last_of(history(Record(1, 1, False), Record(2, 2, False))) == "step=2.ckpt"
    assert last_of({}) is None


@pytest.mark.parametrize(("mode", "best"), [("min", "step=20.ckpt"), ("max", "step=30.ckpt")])
def test_the_best_stays(mode, best):
    scores = {10: 2.0, 20: 1.0, 30: 3.0, 40: None, 50: 2.5}
    records = history(*(Record(step, step // 10, True, score) for step, score in scores.items()))
    assert best_first(records, mode, 1) == [best]
    assert set(to_delete(records, keep(1, 1, mode))) == set(records) - {best, "step=50.ckpt"}


def test_of_equal_scores_the_older_one_is_the_better():
    records = history(*(Record(step, step, True, 1.0) for step in (1, 2, 3)))
    for mode in ("min", "max"):
        assert best_first(records, mode, 2) == ["step=1.ckpt", "step=2.ckpt"]


def test_a_score_of_weights_that_are_not_finite_is_none():
    records = history(Record(1, 1, True, 5.0), Record(2, 2, False, 1.0), Record(3, 3, True, float("nan")))
    assert best_first(records, "min", 9) == ["step=1.ckpt"]


def test_permanent_ones_protected_ones_and_those_without_a_number_stay():
    records = history(
        Record(1, 1, True, permanent=True), Record(2, 2, True), Record(3, 3, True), Record(4, 0), Record(5, 5, True)
    )
    assert to_delete(records, keep(1), protected=["step=2.ckpt"]) == ["step=3.ckpt"]


def test_a_full_disk_costs_what_is_not_finite_then_the_oldest_and_never_the_last_good_one():
    records = history(Record(1, 1, True), Record(2, 2, True), Record(3, 3, False), Record(4, 4, False))
    order = []
    while name := to_make_room(records, keep(4)):
        order.append(name)
        del records[name]
    assert order == ["step=3.ckpt", "step=4.ckpt", "step=1.ckpt"]


@given(folders(), RETENTIONS)
def test_what_must_stay_stays(records, retention):
    gone = to_delete(records, retention)
    assert len(set(gone)) == len(gone)
    assert not any(records[name].permanent for name in gone)
    good = [name for name, record in records.items() if record.finite]
    assert max(good, key=lambda name: records[name].number, default=None) not in gone
    assert last_of(records) not in gone
    assert not set(best_first(records, retention.mode, retention.keep_best)) & set(gone)
    newest = sorted(records, key=lambda name: records[name].number)[-retention.keep_last :]
    assert not set(newest) & set(gone)


@given(st.lists(RECORDS, min_size=1, max_size=12), RETENTIONS)
def test_in_any_run_a_finite_checkpoint_is_there_once_there_was_one(saves, retention):
    folder: dict[str, Record] = {}
    good = False
    for number, record in enumerate(saves, 1):
        new = Record(record.step, number, record.finite, record.score, record.permanent)
        folder[f"{number}"] = new
        good |= bool(new.finite)
        for name in to_delete(folder, retention):
            del folder[name]
        assert f"{number}" in folder
        assert any(other.finite for other in folder.values()) == good
