"""Say which rank of a distributed run failed first, and end the run."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_tricks._errors import UsageError
from lightning_tricks._exit import end_within
from lightning_tricks._lightning import pl
from lightning_tricks.monitors.ranks.rank_line import Connection, Hub, Member, say

CAUSE_SECONDS = 5.0  # how long an error that may be the consequence of another's waits for that
_CONSEQUENCE = re.compile(
    "gloo/|connection (closed|reset) by peer|broken pipe|nccl|process ?group|socket timeout|timed out waiting", re.I
)


def is_consequence(error: BaseException) -> bool:
    """Whether an exception says that this process could not reach another: most likely that one has failed.

    True for torch.distributed's network errors, and for what gloo or NCCL say in a RuntimeError or torch.distributed in
    another error of its own; also where an exception was raised from one of these.
    """
    for each in _chain(error):
        theirs = type(each) is RuntimeError or type(each).__module__.startswith("torch.distributed")
        if isinstance(each, dist.DistError) or (theirs and _CONSEQUENCE.search(str(each))):
            return True
    return False


def _chain(error: BaseException, only_causes: bool = False) -> Iterator[BaseException]:
    """An exception and those it came from: by `raise ... from`, or also those that were handled when it was raised."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or (None if only_causes else each.__context__)


class RankMonitor(pl.Callback):
    """Say on every rank, in one line, which rank failed first and why, and let none outlive it. Never changes training.

    A rank that fails with an exception shows its traceback as ever; those that only broke because of it say the line in
    place of theirs. The others say it, too, of a rank that is killed. A rank that is stuck then, in a collective that
    never returns or in code of the user, ends `grace_seconds` later with exit code 1 and shows where it was. A rank
    that ends in order, is slow, stopped, compiling or saving for an hour is no failure. A user's interrupt and
    SystemExit are as without. One process: no effect.

    A failure ends nothing but its own fit. A program that catches the exception and goes on, with another Trainer for
    example, is as without: no process of it is ended, and no later exception is hidden.

    Steps are not touched: each rank holds an idle TCP connection to rank 0, on a port that is free there, from `setup`
    to `teardown`. The system closes it when a process dies.

    Args:
        grace_seconds: what the others have to save or to leave in order. Lightning's own launcher and torchrun notice a
            death as well, and kill after at most 5 and 30.

    Raises:
        UsageError: it is negative.
    """

    def __init__(self, grace_seconds: float = 20.0) -> None:
        if grace_seconds < 0:
            raise UsageError(f"RankMonitor.grace_seconds={grace_seconds}: give 0 or more")
        self.grace_seconds = grace_seconds
        self._watch: _Watch | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Connect the ranks; all of them must call."""
        self._leave()
        if trainer.world_size == 1:
            return
        me = Member(trainer.global_rank, trainer.world_size, socket.gethostname(), os.getpid())
        hub = Hub(_names_of_this_host(), one_host=trainer.num_nodes == 1) if me.rank == 0 else None
        mine: Any = (hub.address, me) if hub is not None else None
        address, rank_0 = trainer.strategy.broadcast(mine)
        self._watch = _Watch(Connection(me, address, rank_0), hub, self.grace_seconds)
        self._watch.start()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """The end of this rank, in order."""
        self._leave()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Tell the others, or find out whose failure this is the consequence of."""
        watch = self._watch
        if watch is None:
            return
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            if type(exception).__name__ == "SIGTERMException":
                watch.known.wait(1.0)  # a launcher sends it to the ranks that are left
            self._leave()
            return
        hide = is_consequence(exception) and watch.known.wait(CAUSE_SECONDS)
        if not hide:
            watch.connection.fail(exception)
            watch.known.wait(CAUSE_SECONDS)
        launched = getattr(trainer.strategy.launcher, "procs", [])
        children = [process for process in launched if isinstance(process, subprocess.Popen)]
        _ExceptHook(watch.fit, hide, self.grace_seconds, children).install()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch.join(1.0)
            if self._watch.hub is not None:
                self._watch.hub.join(5.0)  # its goodbyes must be out before this process ends
        self._watch = None


class _Fit:
    """The call of a Trainer's `fit`, `validate`, `test` or `predict` that this thread is in, told apart from any other.

    Lightning 2.6 makes a bound method for each such call and keeps it in the frame of `_call_and_handle_interrupt`,
    which every exception of that call passes. Referred to weakly here: what a failed fit holds is freed as without us.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        methods = map(_method, _outwards(sys._getframe()))
        method = next((each for each in methods if each is not None), None)
        self._method = None if method is None else weakref.ref(method, lambda _: _ExceptHook.withdraw())

    def over(self) -> bool:
        """Whether the call has ended and its exception, if any, is dropped."""
        return self._method is None or self._method() is None

    def stack(self) -> list[str] | None:
        """Where the call is now, as text; None when it has ended."""
        innermost = sys._current_frames().get(self._thread)
        if not self._among(_outwards(innermost)):
            return None
        return traceback.format_stack(innermost)

    def raised(self, error: BaseException) -> bool:
        """Whether an exception came out of the call."""
        return self._among(frame for frame, _ in traceback.walk_tb(error.__traceback__))

    def _among(self, frames: Iterable[FrameType]) -> bool:
        method = None if self._method is None else self._method()
        return method is not None and any(_method(frame) is method for frame in frames)


def _method(frame: FrameType) -> Any:
    return frame.f_locals.get("trainer_fn") if frame.f_code.co_name == "_call_and_handle_interrupt" else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Watch(threading.Thread):
    """Waits for the first failure of a fit, says it, and ends this process if it is still in that fit after the grace.

    Args:
        connection: this rank's.
        hub: rank 0's, not started yet.
        grace_seconds: as RankMonitor's.
    """

    def __init__(self, connection: Connection, hub: Hub | None, grace_seconds: float) -> None:
        super().__init__(daemon=True, name="rank-monitor")
        self.connection, self.hub, self.fit = connection, hub, _Fit()
        self.known = threading.Event()
        self._closed = threading.Event()
        self._grace_seconds = grace_seconds

    def start(self) -> None:
        if self.hub is not None:
            self.hub.start()
        super().start()

    def close(self) -> None:
        """Leave the run in order; from then on this does nothing."""
        self._closed.set()
        self.connection.close()
        if self.hub is not None:
            self.hub.close()

    def run(self) -> None:
        if not self.connection.connect():
            if not self._closed.is_set():
                where = self.connection.address
                say(
                    f"RankMonitor: rank {self.connection.member.rank} cannot reach rank 0 at "
                    f"{' or '.join(where.hosts)}, port {where.port}: it is not watched"
                )
            return
        failure = self.connection.listen()
        if failure is None or self._closed.is_set():
            return
        say(failure)
        self.known.set()
        if self._closed.wait(self._grace_seconds):
            return
        stack = self.fit.stack()
        if stack is None:
            self.close()  # the program has caught the exception, and goes on
        else:
            self._end("".join(stack).rstrip())

    def _end(self, stack: str) -> None:
        threading.Timer(5.0, os._exit, (1,)).start()  # where nobody reads what is written here
        rank = self.connection.member.rank
        say(f"rank {rank} is ended, {self._grace_seconds:g} s later it was still here:\n{stack}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class _ExceptHook:
    """What Python calls with an exception that nobody caught: hide a consequence, and do not hang on the way out.

    It acts for the exceptions of one fit. When the program has dropped them, `sys.excepthook` is what it was before.

    Args:
        fit: whose exceptions.
        hide: whether their tracebacks are left out.
        seconds: what the children are waited for.
        children: processes of Lightning's launcher, whose end none but their parent would notice.
    """

    def __init__(self, fit: _Fit, hide: bool, seconds: float, children: list[subprocess.Popen]) -> None:
        self._fit, self._hide, self._seconds, self._children = fit, hide, seconds, children
        self._before: Callable[..., Any] = sys.excepthook

    def install(self) -> None:
        sys.excepthook = self

    @staticmethod
    def withdraw() -> None:
        """Put back what was there before the hooks of fits that are over; one that others have built upon stays."""
        while isinstance(sys.excepthook, _ExceptHook) and sys.excepthook._fit.over():
            sys.excepthook = sys.excepthook._before

    def __call__(self, kind: Any, error: BaseException, trace: Any) -> None:
        if not (self._hide and self._fit.raised(error)):
            self._before(kind, error, trace)
        if any(map(self._fit.raised, _chain(error, only_causes=True))):
            self._end_in_time()

    def _end_in_time(self) -> None:
        end_within(self._seconds + 5.0)
        deadline = time.monotonic() + self._seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()


def _names_of_this_host() -> tuple[str, ...]:
    name = socket.gethostname()
    names = [os.environ.get("MASTER_ADDR", ""), name]
    with suppress(OSError):
        names.append(socket.gethostbyname(name))
    return tuple(dict.fromkeys(each for each in names if each))
