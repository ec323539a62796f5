"""Say which rank of a distributed run failed first, and end the run."""

import os
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks._exit import call_before_exit
from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._trainer import is_a, launched_processes
from lightning_tricks.monitors.ranks.connection import Connection, Member, say
from lightning_tricks.monitors.ranks.failed_fit import ExceptHook, RunningFit, is_consequence
from lightning_tricks.monitors.ranks.hub import Hub

CAUSE_SECONDS = 5.0  # how long a rank with a network error waits for the failure of another rank that explains it


class RankMonitor(pl.Callback):
    """Say on every rank, in one line, which rank failed first and why, and let none outlive it. Never changes training.

    A rank that fails with an exception shows its traceback as usual; ranks that fail only as a consequence print the
    line in place of theirs. If a rank is killed, all others print the line. A rank that is then stuck, in a collective
    that never returns or in the user's code, ends after `grace_seconds` with exit code 1, and shows where it was. A
    rank that ends in order, or is slow, stopped, compiling or saving for an hour, is no failure. Ctrl-C and SystemExit
    act as they do without this callback. With one process it has no effect.

    A failure ends only its own fit. If the program catches the exception and goes on, with another Trainer for example,
    no process of it is ended, and no later exception is hidden.

    Steps do not change: each rank holds an idle TCP connection to a free port of rank 0, from `setup` to `teardown`.
    The operating system closes it when a process dies.

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
        self._at_end = ExitStack()

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
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
        # a guard that ends this process prints the reason itself: the other ranks must not take that for a death
        self._at_end.callback(call_before_exit(self._watch.close))

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
        ExceptHook(watch.fit, hide, self.grace_seconds, launched_processes(trainer)).install()

    def _leave(self) -> None:
        self._at_end.close()
        if self._watch is not None:
            self._watch.close()
            self._watch.join(1.0)
            if self._watch.hub is not None:
                self._watch.hub.join(5.0)  # its goodbyes must be out before this process ends
        self._watch = None


class _Watch(threading.Thread):
    """Waits for the first failure of a fit, prints it, and ends this process if it is still in that fit after a while.

    Args:
        connection: of this rank.
        hub: on rank 0, the server, which starts and ends with this thread; None on other ranks.
        grace_seconds: time between the failure and the end of this process.
    """

    def __init__(self, connection: Connection, hub: Hub | None, grace_seconds: float) -> None:
        super().__init__(daemon=True, name="rank-monitor")
        self.connection, self.hub, self.fit = connection, hub, RunningFit()
        self.known = threading.Event()
        self._closed = threading.Event()
        self._grace_seconds = grace_seconds

    def start(self) -> None:
        if self.hub is not None:
            self.hub.start()
        super().start()

    def close(self) -> None:
        """Leave the run in order, and do nothing from then on."""
        self._closed.set()
        self.connection.close()
        if self.hub is not None:
            self.hub.close()

    def run(self) -> None:
        if not self.connection.connect():
            if not self._closed.is_set():
                rank, where = self.connection.member.rank, self.connection.address
                at = f"{' or '.join(where.hosts)}, port {where.port}"
                say(f"RankMonitor: rank {rank} cannot reach rank 0 at {at}: it is not watched")
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
        threading.Timer(5.0, os._exit, (1,)).start()  # in case nobody reads stderr, and writing to it blocks
        rank = self.connection.member.rank
        say(f"rank {rank} is ended, {self._grace_seconds:g} s later it was still here:\n{stack}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _names_of_this_host() -> tuple[str, ...]:
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with suppress(OSError):
        names.append(socket.gethostbyname(names[1]))
    return tuple(dict.fromkeys(filter(None, names)))
