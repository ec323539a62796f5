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

CAUSE_SECONDS = 5.0  # how long an error that may be the consequence of another's waits for that


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
        # a guard that ends this process has said why: the other ranks shall not take that for a death
        self._at_end.callback(call_before_exit(self._watch.close))

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """The end of this rank, in order."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Tell the others, or find out whose failure this is the consequence of."""
        watch = self._watch
        if watch is None:
            return
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            if is_a(exception, "SIGTERMException"):
                watch.known.wait(1.0)  # a launcher sends it to the ranks that are left
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
    """Waits for the first failure of a fit, says it, and ends this process if it is still in that fit after the grace.

    Rank 0 gives its hub, which starts and ends with this.
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
        """Leave the run in order; from then on this does nothing."""
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
        threading.Timer(5.0, os._exit, (1,)).start()  # where nobody reads what is written here
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
