"""The deadlines of a process, which share faulthandler's one timer."""

import math
from types import SimpleNamespace

import pytest

from lightning_tricks._host import exit as _exit
from lightning_tricks._host.exit import Deadline, end_within


class Timer:
    """faulthandler's, and the time: `goes_off` is in how many seconds from the start, and whether the process ends."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.goes_off = 0.0, None
        monkeypatch.setattr(_exit, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(_exit, "faulthandler", self)
        monkeypatch.setattr(_exit, "_set", {})

    def dump_traceback_later(self, seconds, exit, file):
        self.goes_off = (round(self.now + seconds, 3), exit)

    def cancel_dump_traceback_later(self):
        self.goes_off = None


@pytest.fixture
def timer(monkeypatch):
    return Timer(monkeypatch)


def test_the_nearest_deadline_wins_and_a_farther_one_comes_back_when_it_is_cancelled(timer):
    far, near = end_within(30.0), end_within(3.0)
    assert timer.goes_off == (3.0, True)
    timer.now = 1.0
    farthest = end_within(60.0)
    assert timer.goes_off == (3.0, True)
    near.cancel()
    assert timer.goes_off == (30.0, True)
    far.set(100.0)
    assert timer.goes_off == (61.0, True)
    for deadline in (farthest, farthest, far):
        deadline.cancel()
    assert timer.goes_off is None


def test_a_deadline_that_only_prints_does_not_put_off_the_end(timer):
    """After it has gone off, nobody could set the timer anew while C code holds Python's lock."""
    prints, ends = Deadline(ends=False), Deadline()
    prints.set(2.0)
    assert timer.goes_off == (2.0, False)
    ends.set(5.0)
    assert timer.goes_off == (5.0, True)
    timer.now = 3.0
    ends.cancel()
    assert timer.goes_off is None  # its time has passed
    prints.set(2.0)
    assert timer.goes_off == (5.0, False)


def test_an_end_that_is_overdue_comes_at_once_and_an_infinite_one_never(timer):
    end_within(3.0)
    timer.now = 4.0
    never = end_within(math.inf)
    assert timer.goes_off == (4.001, True)
    never.cancel()


def test_a_forked_process_has_none_of_its_parents_deadlines(timer):
    end_within(3.0)
    _exit._forget_deadlines()
    timer.goes_off = None
    Deadline().cancel()
    own = end_within(9.0)
    assert timer.goes_off == (9.0, True)
    own.cancel()


def test_a_deadline_in_a_thousand_years_is_no_error():
    deadline = Deadline(ends=False)
    deadline.set(1e12)  # with the real timer, which would raise OverflowError
    deadline.cancel()
