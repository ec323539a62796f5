"""Say which rank of a distributed run failed first, and end the run."""

import faulthandler
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.callbacks._rank_line import Address, Hub, Line, Member, say

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


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or each.__context__


def end_within(seconds: float) -> None:
    """End this process then, if it is still there: a process group whose other half is gone may hang at its end."""
    with suppress(RuntimeError, ValueError, OSError):  # no stderr, or one that is no file
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


class RankMonitor(pl.Callback):
    """Say on every rank, in one line, which rank failed first and why, and let none outlive it. Never changes training.

    A rank that fails with an exception shows its traceback as ever; those that only broke because of it say the line in
    place of theirs. The others say it, too, of a rank that is killed. A rank that is stuck then, in a collective that
    never returns or in code of the user, ends `grace_seconds` later with exit code 1 and shows where it was. A rank
    that ends in order, is slow, stopped, compiling or saving for an hour is no failure. A user's interrupt and
    SystemExit are as without, and so is a program that catches the exception and goes on. One process: no effect.

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
        self._hub: Hub | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Connect the ranks; all of them must call."""
        self._leave()
        if trainer.world_size == 1:
            return
        me = Member(trainer.global_rank, trainer.world_size, socket.gethostname(), os.getpid())
        mine: Any = None
        if me.rank == 0:
            self._hub = Hub(_names_of_this_host())
            self._hub.start()
            mine = self._hub.address, me
        address, rank_0 = trainer.strategy.broadcast(mine)
        self._watch = _Watch(me, address, rank_0, self.grace_seconds)
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
            watch.line.fail(exception)
            watch.known.wait(CAUSE_SECONDS)
        launched = getattr(trainer.strategy.launcher, "procs", [])
        children = [process for process in launched if isinstance(process, subprocess.Popen)]
        sys.excepthook = _at_exit(sys.excepthook, exception if hide else None, self.grace_seconds, children)

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch.join(1.0)
        if self._hub is not None:
            self._hub.close()
            self._hub.join(5.0)  # its goodbyes must be out before this process ends
        self._watch, self._hub = None, None


class _Watch(threading.Thread):
    """Waits for the first failure, says it, and ends this process where it is still in the Trainer after the grace."""

    def __init__(self, member: Member, address: Address, rank_0: Member, grace_seconds: float) -> None:
        super().__init__(daemon=True, name="rank-monitor")
        self.line = Line(member, address, rank_0)
        self.known = threading.Event()
        self._closed = threading.Event()
        self._grace_seconds = grace_seconds
        self._watched = threading.get_ident()

    def close(self) -> None:
        self._closed.set()
        self.line.close()

    def run(self) -> None:
        if not self.line.connect():
            if not self._closed.is_set():
                address = f"{' or '.join(self.line.address.hosts)}, port {self.line.address.port}"
                say(f"RankMonitor: rank {self.line.member.rank} cannot reach rank 0 at {address}: it is not watched")
            return
        failure = self.line.listen()
        if failure is None or self._closed.is_set():
            return
        say(failure)
        self.known.set()
        if not self._closed.wait(self._grace_seconds):
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        frame = sys._current_frames().get(self._watched)
        calls = [call.name for call in traceback.extract_stack(frame)] if frame is not None else []
        if "_call_and_handle_interrupt" not in calls:
            return  # the user's program has caught the exception, and goes on
        threading.Timer(5.0, os._exit, (1,)).start()  # where nobody reads what is written here
        stack = "".join(traceback.format_stack(frame)).rstrip()
        say(f"rank {self.line.member.rank} is ended, {self._grace_seconds:g} s later it was still here:\n{stack}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _at_exit(
    before: Callable[..., Any], hidden: BaseException | None, seconds: float, children: list[subprocess.Popen]
) -> Callable[..., Any]:
    """What Python calls with an exception that nobody caught: hide a consequence, and do not hang on the way out."""

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if hidden is None or hidden not in _chain(error):
            before(kind, error, trace)
        end_within(seconds + 5.0)
        deadline = time.monotonic() + seconds
        for child in children:  # of Lightning's launcher, whose end none but their parent would notice
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()

    return hook


def _names_of_this_host() -> tuple[str, ...]:
    name = socket.gethostname()
    names = [os.environ.get("MASTER_ADDR", ""), name]
    with suppress(OSError):
        names.append(socket.gethostbyname(name))
    return tuple(dict.fromkeys(each for each in names if each))
