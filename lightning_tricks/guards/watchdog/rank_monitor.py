"""Say which rank of a distributed run failed first, and end the run."""

import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from lightning_tricks._core.errors import UsageError
from lightning_tricks._host.exit import end_children, end_within
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.objects import is_a
from lightning_tricks._trainer.processes import launched_processes
from lightning_tricks._trainer.running import RunningCall
from lightning_tricks.guards.watchdog.channel import Connection, connect, end_process, say

__all__ = ["RankMonitor"]

CAUSE_SECONDS = 5.0  # how long a rank with a network error waits for the failure of another rank that explains it
_MARK = "_of_rank_monitor"
_CONSEQUENCE = re.compile(
    "gloo/|connection (closed|reset) by peer|broken pipe|nccl|process ?group|socket timeout|timed out waiting", re.I
)


def is_consequence(error: BaseException) -> bool:
    """Whether an exception, or one that it came from, says that this process could not reach another process.

    That is so for torch.distributed's network errors, and for errors with a message of gloo, NCCL or torch.distributed.
    """
    for each in _chain(error):
        may_be = type(each) is RuntimeError or type(each).__module__.startswith("torch.distributed")
        if isinstance(each, dist.DistError) or (may_be and _CONSEQUENCE.search(str(each))):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it came from."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or each.__context__


class ExceptHook:
    """A `sys.excepthook`: hides the traceback of a consequence, and lets no process hang after an uncaught exception.

    It acts on the exceptions that `mark` has marked; every other one is the earlier hook's alone.
    """

    def __init__(self) -> None:
        self._before: Callable[..., Any] = sys.excepthook

    @staticmethod
    def mark(error: BaseException, hide: bool, seconds: float, children: Sequence[subprocess.Popen]) -> None:
        """Have the process end within `seconds` after an exception, once `children` of Lightning's launcher have."""
        vars(error)[_MARK] = hide, seconds, children
        if not isinstance(sys.excepthook, ExceptHook):
            sys.excepthook = ExceptHook()

    def __call__(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Show the exception unless it is to be hidden, and see that the process ends."""
        if not vars(error).get(_MARK, (False,))[0]:
            self._before(kind, error, trace)
        marked = next((vars(each)[_MARK] for each in _chain(error) if _MARK in vars(each)), None)
        if marked is not None:
            _, seconds, children = marked
            end_within(seconds + 5.0)
            end_children(children, seconds)  # only their parent can notice their end


class RankMonitor(pl.Callback):
    """Name on every rank the rank that failed first, and end those that outlive it. Never changes training.

    A rank that fails with an exception shows its traceback as usual; ranks that fail only as a consequence print the
    line in place of theirs. If a rank is killed, all others print the line. A rank that is then stuck, in a collective
    that never returns or in the user's code, ends after `grace_seconds` with exit code 1, and shows where it was. A
    rank that ends in order, or is slow, stopped, compiling or saving for an hour, is no failure. Ctrl-C and SystemExit
    act as they do without this callback. With one process it has no effect.

    A failure ends only its own fit. If the program catches the exception and goes on, with another Trainer for example,
    no process of it is ended, and no later exception is hidden.

    Steps do not change: each rank holds a TCP connection to a free port of rank 0, from `setup` to `teardown`. The
    operating system closes it when a process dies.

    Args:
        grace_seconds: time that the other ranks have to save or to end in order. Lightning's launcher and torchrun
            notice a death as well, and kill the other processes at most 5 s and 30 s later.

    Raises:
        UsageError: `grace_seconds` is negative.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        if grace_seconds < 0:
            raise UsageError(f"RankMonitor.grace_seconds={grace_seconds}: give 0 or more")
        self.grace_seconds = grace_seconds
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Connect the ranks; all of them must call."""
        self._leave()
        if (connection := connect(trainer)) is not None:
            self._watch = _Watch(connection, self.grace_seconds, launched_processes(trainer))
            connection.when_failed(self._watch.hear)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Tell the other ranks that this one ends in order."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Tell the others, or find out which rank's failure has caused this one."""
        watch = self._watch
        if watch is None:
            return
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            if is_a(exception, "SIGTERMException"):
                watch.known.wait(1.0)  # a launcher sends SIGTERM to the other ranks after a failure
            self._leave()
            return
        hide = is_consequence(exception) and watch.known.wait(CAUSE_SECONDS)
        if not hide:
            watch.connection.fail(exception)
            watch.known.wait(CAUSE_SECONDS)
        ExceptHook.mark(exception, hide, self.grace_seconds, watch.children)

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None


class _Watch:
    """Prints the first failure of a fit, and ends this process, with its children, if it is still in that fit later."""

    def __init__(self, connection: Connection, grace_seconds: float, children: Sequence[subprocess.Popen]) -> None:
        self.connection, self.children, self._grace_seconds = connection, children, grace_seconds
        self.fit, self.known = RunningCall(), threading.Event()
        self.timer = threading.Timer(grace_seconds, self._end)
        self.timer.daemon, self.timer.name = True, "rank-monitor"
        self._closed = False

    def hear(self, failure: str) -> None:
        """The line of the first failure: print it, and begin the grace."""
        if not self._closed:
            say(failure)
            self.timer.start()
            self.known.set()

    def close(self) -> None:
        """Leave the run in order, and do nothing from then on. Idempotent."""
        if not self._closed:
            self._closed = True
            self.timer.cancel()
            self.connection.leave()

    def _end(self) -> None:
        stack = self.fit.stack()
        if self._closed or not stack:  # the program has caught the exception, and goes on
            self.close()
            return
        shown = "".join(traceback.format_stack(stack[0])).rstrip()
        rank = self.connection.process.rank
        end_within(10.0)  # in case nobody reads stderr, and writing to it blocks
        say(f"rank {rank} is ended, {self._grace_seconds:g} s later it was still here:\n{shown}")
        end_process(self.children)
