"""End a process that could hang while it exits."""

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

CHILDREN_SECONDS = 5.0  # for the processes of a launcher to end by themselves
_before_exit: list[Callable[[], None]] = []  # functions that `end_now` calls


def end_within(seconds: float) -> None:
    """End this process after `seconds` if it still runs: a process group may hang at its end when a peer has died."""
    with suppress(RuntimeError, ValueError, OSError):  # no stderr, or one that is no file
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def call_before_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Let `end_now` call a function, in any thread; returns a function that takes this back."""
    _before_exit.append(function)

    def withdraw() -> None:
        with suppress(ValueError):
            _before_exit.remove(function)

    return withdraw


def end_now(code: int, children: Sequence[subprocess.Popen] = ()) -> None:
    """End this process from any thread, while others may be stuck, with its data workers and `children`.

    Python's own exit is skipped, because it would wait for the stuck threads.

    Args:
        code: exit code of the process.
        children: are given `CHILDREN_SECONDS` to end by themselves, then killed.
    """
    end_within(2 * CHILDREN_SECONDS)  # if a write below blocks, because nobody reads it
    for function in list(_before_exit):
        with suppress(Exception):
            function()
    for worker in multiprocessing.active_children():
        worker.kill()  # one that is stuck would not notice that its parent is gone
    deadline = time.monotonic() + CHILDREN_SECONDS
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
