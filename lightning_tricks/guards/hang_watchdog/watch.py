"""The thread that looks at the place of the training thread, now and then, and speaks up when it stays the same."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_tricks._exit import end_now
from lightning_tricks._trainer import dismiss_process_observer, is_running, launched_processes
from lightning_tricks.guards.hang_watchdog.board import Board
from lightning_tricks.guards.hang_watchdog.place import (
    ENDED,
    FAILED,
    Place,
    read,
    stack_of,
    stacks,
    started_at,
)
from lightning_tricks.guards.hang_watchdog.verdict import verdict

LOOK_SECONDS = 2.0  # between two looks, at most
ANSWER_SECONDS = 5.0  # how long a rank waits for the places of the others, which answer in their next look
TIMER_SECONDS = 6.0  # beyond the limit: the others have named this rank then
SILENT_SECONDS = 5.0  # after the answers: for the timer of a rank that gives none


@dataclass(frozen=True)
class Limits:
    """Seconds that one place may last.

    Args:
        seconds: of a training or validation batch, and of all that lies between two of them.
        first_seconds: until the first training step is done, and of the first validation batch.
        checkpoint_seconds: of a checkpoint.
    """

    seconds: float
    first_seconds: float
    checkpoint_seconds: float

    def of(self, place: Place, first_step: int) -> tuple[str, float]:
        """The option that holds for a place, and its value.

        Args:
            place: where a rank is.
            first_step: optimizer steps done before the first one of this fit.
        """
        if place.part == "checkpoint":
            return "checkpoint_seconds", self.checkpoint_seconds
        first_batch = place.part == "validation" and not place.validations and place.validation_batches <= 1
        if first_batch if place.evaluating else place.step <= first_step:
            return "first_step_seconds", self.first_seconds
        return "limit_seconds", self.seconds


class Watch(threading.Thread):
    """Watches the thread that makes it, from `start` to `close`; ends by itself when the Trainer's call is over.

    In each look it tells the other ranks the place of this one. It sets faulthandler's timer anew, too, a little beyond
    the limit: that needs no lock of Python's, and so it also fires where C code holds it and this thread stands still.

    Args:
        trainer: read only.
        process: this one.
        rank_0: the process of rank 0.
        limits: see `Limits`.
        abort: end this process after the report of a hang.
        board: on which the ranks talk.
    """

    def __init__(
        self,
        trainer: Any,
        process: Place,
        rank_0: Place,
        limits: Limits,
        abort: bool,
        board: Board,
    ) -> None:
        super().__init__(daemon=True, name="hang-watchdog")
        self._trainer, self._limits, self._abort = trainer, limits, abort
        self._process, self._rank_0, self._place = process, rank_0, process
        self._board = board
        self._thread = threading.get_ident()
        self._closed = threading.Event()
        self._since = time.monotonic()
        self._answered = 0  # requests
        self._reported = False  # this place
        self.validations = 0
        self.first_step = sys.maxsize  # training has not begun

    # ---- from the training thread

    def close(self, error: BaseException | None = None) -> None:
        """End the watch, and tell the other ranks why. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.join(2 * ANSWER_SECONDS)
        detail = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}" if error else ""
        self._place = replace(self._place, part=FAILED if error else ENDED, evaluating=False, detail=detail)
        self._tell()
        self._disarm()

    # ---- the thread's own

    def run(self) -> None:
        """Look at the place at least ten times within the limit."""
        self._arm(self._limits.first_seconds)
        self._tell()
        every = pause = min(LOOK_SECONDS, self._limits.seconds / 10)
        try:
            while not self._closed.wait(pause):
                pause = max(0.01, min(every, self._look()))
        finally:
            self._disarm()

    def _look(self) -> float:
        """Look once; returns the seconds until the limit."""
        stack = stack_of(self._thread)
        if not is_running(self._trainer, stack):  # another callback's error has kept `on_exception` from us
            self._closed.set()
            return 0.0
        place = read(self._process, self._trainer, stack, self.validations)
        if place.progress() != self._place.progress():
            self._go_on()
        self._place = place
        option, limit = self._limits.of(place, self.first_step)
        left = self._since + limit - time.monotonic()
        requests = self._tell()
        if self._reported:
            if requests > self._answered:  # by a rank that has gone on meanwhile, and stands still again
                self._answered = requests
                self._tell()
            return self._limits.seconds
        if left <= 0 or requests > self._answered:
            self._disarm()
            why = "another rank asks" if left > 0 else f"{option}={limit:g}"
            self._answered = requests if left > 0 else self._board.request()
            self._report(why)
        else:
            self._arm(left)
        return max(left, 0.0)

    def _go_on(self) -> None:
        if self._reported:
            say(f"HangWatchdog: {self._place.name} goes on, after {time.monotonic() - self._since:.3g} s")
        self._since, self._reported = time.monotonic(), False

    def _tell(self, ended: bool = False) -> int:
        return self._board.tell({"place": self._place.to_dict(), "answers": self._answered, "ended": ended})

    def _report(self, why: str) -> None:
        """Say where this rank is, and who is behind; end the process if that is asked for."""
        self._reported = True
        self._tell()
        place, seconds = self._place, time.monotonic() - self._since
        detail = f": {place.detail}" if place.detail else ""
        say(f"HangWatchdog: {place.name} has been {place.text()} for {seconds:.3g} s ({why}){detail}\n{stacks()}")
        if self._abort:
            dismiss_process_observer()  # it would kill this process as soon as another one has ended
        silent = self._name_the_one_behind() if self._board.was_open else {}
        if self._abort and not self._closed.is_set():
            say(f"HangWatchdog: {place.name} is ended, with exit code 1")
            self._wait_for_reports(silent)
            _kill(silent, place.host)
            end_now(1, launched_processes(self._trainer))

    def _name_the_one_behind(self) -> dict[int, Place | None]:
        """Wait for the places of the other ranks and say which one is behind; returns those that do not answer."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            self._answered = max(self._answered, self._tell())  # of another rank that asks at the same time
            told = self._board.told()
            known = {rank: Place.from_dict(each["place"]) for rank, each in told.items()}
            places = {rank: place for rank, place in known.items() if _answers(told[rank], self._answered)}
            silent = {rank: known.get(rank) for rank in range(self._place.world) if rank not in places}
            if not silent or not self._board.is_open or self._closed.is_set() or time.monotonic() > deadline:
                break
            self._closed.wait(0.1)
        if self._board.is_open:
            say(f"HangWatchdog: {verdict(places, silent, self._place.world)}")
            return silent
        say(
            f"HangWatchdog: {self._rank_0.name} gives no sign of life, or its launcher does not: the store of the "
            "process group, which one of them runs, does not answer"
        )
        return {0: self._rank_0}

    def _wait_for_reports(self, silent: Mapping[int, Place | None]) -> None:
        """Wait until the other ranks have said all they have to say: the store may end with this process."""
        self._tell(ended=True)
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._board.is_open and time.monotonic() < deadline:
            told = self._board.told()
            if all(each["ended"] or rank in silent or _has_left(each) for rank, each in told.items()):
                break
            time.sleep(0.05)
        if silent:
            time.sleep(SILENT_SECONDS)

    def _arm(self, left: float) -> None:
        with suppress(RuntimeError, ValueError, OSError):  # no stderr, or one that is no file
            faulthandler.dump_traceback_later(left + TIMER_SECONDS, exit=self._abort, file=sys.__stderr__ or 2)

    @staticmethod
    def _disarm() -> None:
        faulthandler.cancel_dump_traceback_later()


def _has_left(told: Mapping[str, Any]) -> bool:
    return told["place"]["part"] in (ENDED, FAILED)


def _answers(told: Mapping[str, Any], request: int) -> bool:
    """Whether a rank has told its place since a request; one that is about to end has told its last one."""
    return told["answers"] >= request or told["ended"] or _has_left(told)


def _kill(silent: Mapping[int, Place | None], host: str) -> None:
    """Kill the processes of this host that gave no answer: a stopped one would be left over."""
    for place in silent.values():
        if place and place.host == host and place.started and started_at(place.pid) == place.started:
            with suppress(OSError):
                os.kill(place.pid, 9)


def say(text: str) -> None:
    """Print where errors go, in one piece, as all ranks may do so at the same moment."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
