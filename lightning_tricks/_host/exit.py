"""End a process that could hang while it exits."""

import faulthandler
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

CHILDREN_SECONDS = 5.0  # for the processes of a launcher to end by themselves
_LONGEST = 1e9  # of faulthandler's timer, which takes no 300 years
_set: dict["Deadline", float] = {}  # the deadlines that are set, on `time.monotonic`
_lock = threading.RLock()  # around `_set` and the timer


class Deadline:
    """A time at which this process prints its stacks, and ends if `ends`, also while C code holds Python's lock.

    Owns faulthandler's timer, of which a process has one; the process ends at the nearest of its deadlines, and a
    farther one holds again when that is cancelled. A deadline that only prints waits for all that end the process: the
    timer goes off once, and nobody could set it anew while Python's lock is held.

    Args:
        ends: whether the process ends then.
        file: a file descriptor for the stacks; the process's stderr if None.
    """

    def __init__(self, ends: bool = True, file: int | None = None) -> None:
        self.ends, self.file = ends, file

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now; infinite seconds cancel it."""
        with _lock:
            _set[self] = time.monotonic() + seconds
            _set_timer()

    def cancel(self) -> None:
        """Take the deadline back. Idempotent."""
        with _lock:
            if _set.pop(self, None) is not None:
                _set_timer()


def _set_timer() -> None:
    """Set faulthandler's timer for the deadline that comes first."""
    now = time.monotonic()
    for deadline, at in list(_set.items()):
        if at == math.inf or (at < now and not deadline.ends):  # that has printed
            del _set[deadline]
    nearest = min(_set, key=lambda each: (not each.ends, _set[each]), default=None)
    with suppress(RuntimeError, ValueError, OSError):  # no stderr, or one that is no file
        if nearest is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            seconds = min(max(_set[nearest] - now, 0.001), _LONGEST)
            faulthandler.dump_traceback_later(seconds, exit=nearest.ends, file=nearest.file or sys.__stderr__ or 2)


def _forget_deadlines() -> None:
    """In a forked process, which has no timer, and whose copy of the lock may be held for ever."""
    global _lock
    _lock = threading.RLock()
    _set.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_deadlines)


def end_within(seconds: float) -> Deadline:
    """End this process after `seconds` if it still runs: a process group may hang at its end when a peer has died."""
    deadline = Deadline()
    deadline.set(seconds)
    return deadline


def end_children(children: Sequence[subprocess.Popen], seconds: float) -> None:
    """Wait for all of the processes together to end by themselves, then kill those that have not."""
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()


def end_now(code: int, children: Sequence[subprocess.Popen] = ()) -> None:
    """End this process from any thread, while others may be stuck, with its data workers and `children`.

    Python's own exit is skipped, because it would wait for the stuck threads.

    Args:
        code: exit code of the process.
        children: are given `CHILDREN_SECONDS` to end by themselves, then killed.
    """
    end_within(2 * CHILDREN_SECONDS)  # if a write below blocks, because nobody reads it
    for worker in multiprocessing.active_children():
        worker.kill()  # one that is stuck would not notice that its parent is gone
    end_children(children, CHILDREN_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
