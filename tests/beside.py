"""Runs of one test file beside each other: while a test waits for its own, those of the next tests go on already."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import two_processes

AHEAD = 3  # runs that go on beside the one that is waited for


class Beside:
    """Waits for a run by its name, and gives what it returned or raised. It has started the next ones in order before.

    Args:
        runs: by name, in the order of the tests that ask for them: a function that starts the run.
        wait: waits for what the function returned.
    """

    def __init__(self, runs: dict[str, Callable[[], Any]], wait: Callable[[Any], Any]) -> None:
        self.runs, self.wait = runs, wait
        self.started: dict[str, Any] = {}
        self.ended: dict[str, Future] = {}

    def __call__(self, name: str) -> Any:
        names = list(self.runs)
        place = names.index(name)
        for each in names[place : place + 1 + AHEAD]:
            if each not in self.started:
                self.started[each] = self.runs[each]()
        if name not in self.ended:
            self.ended[name] = Future()
            try:
                self.ended[name].set_result(self.wait(self.started[name]))
            except Exception as error:
                self.ended[name].set_exception(error)
        return self.ended[name].result()


@contextmanager
def _all_ended(beside: Beside) -> Iterator[Beside]:
    yield beside
    for name in beside.started.keys() - beside.ended.keys():  # which no test of this session has asked for
        with suppress(Exception):
            beside.wait(beside.started[name])


@contextmanager
def processes(runs: dict[str, tuple[Any, ...]]) -> Iterator[Beside]:
    """Runs of `two_processes.start_alone`, by the function and its arguments."""
    starts = {name: partial(two_processes.start_alone, *run) for name, run in runs.items()}
    with _all_ended(Beside(starts, two_processes.end)) as beside:
        yield beside


@contextmanager
def threads(runs: dict[str, tuple[Any, ...]]) -> Iterator[Beside]:
    """Calls of a function that waits for programs, by the function and its arguments."""
    with ThreadPoolExecutor(1 + AHEAD) as pool:
        starts = {name: partial(pool.submit, *run) for name, run in runs.items()}
        with _all_ended(Beside(starts, Future.result)) as beside:
            yield beside
