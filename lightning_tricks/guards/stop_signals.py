"""Why and when a run has to stop: signals, its own time limit, the end of its SLURM job, which may be requeued.

A DataLoader's workers outlive these signals: without them the running step could not be finished.
"""

import atexit
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from typing import Any

from torch.utils.data._utils import worker

from lightning_tricks._core.replaced import replaced
from lightning_tricks._host.process import process_age

MARGIN_FRACTION = 0.1  # of a SLURM job: a short job shall train as well
_torch_loop = worker._worker_loop
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
SECOND_CTRL_C_SECONDS = 1.0  # a launcher may hand on the SIGINT that a terminal has sent to all processes already


class Reason(IntEnum):
    """Why a run stops. Where ranks have different reasons, the largest counts: a user's wish before a scheduler's."""

    NONE = 0
    TIME_LIMIT = 1
    REQUEUE = 2
    SIGTERM = 3
    CTRL_C = 4


class StopSignals:
    """Handlers for the signals that ask a run to stop; each only notes the reason, in the process that installed it.

    A second Ctrl-C, at least a second after the first, raises KeyboardInterrupt. A process that was forked from this
    one inherits the handlers; there they act as those that they replaced.

    Args:
        reasons: by signal number. SIGUSR1 and its like are left to a handler that the program has installed already,
            and every signal that is ignored stays so: `nohup` and a shell's `&` ask for that.
    """

    def __init__(self, reasons: Mapping[int, Reason]) -> None:
        self._reasons = reasons
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._first_ctrl_c: float | None = None
        self.received = Reason.NONE

    def install(self) -> None:
        """Take the signals over; no effect outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, reason in self._reasons.items():
            before = signal.getsignal(number)
            others = reason is Reason.REQUEUE and callable(before)
            if before not in (None, signal.SIG_IGN) and not others:
                self._before[number] = before
                signal.signal(number, self._note)

    def restore(self) -> None:
        """Install the handlers of before, except where somebody else has installed one since. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
                del self._before[number]

    def restore_ctrl_c(self) -> None:
        """The same for SIGINT where Lightning ignores it: it does so while it shuts a run down."""
        before = self._before.pop(signal.SIGINT, None)
        if before is not None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)

    def ignore_at_exit(self) -> None:
        """Have this process, which leaves, end with its own exit code: while Python shuts down, ignore all but Ctrl-C.

        A launcher signals it once more when another process is gone.
        """
        for number in self._before.keys() - {signal.SIGINT}:
            atexit.register(signal.signal, number, signal.SIG_IGN)

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            signal.signal(number, self._before.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_ctrl_c is not None and now - self._first_ctrl_c >= SECOND_CTRL_C_SECONDS:
                raise KeyboardInterrupt
            if self._first_ctrl_c is None:
                self._first_ctrl_c = now
                _write("Ctrl-C: the step is finished and saved first; a second Ctrl-C stops at once")
        self.received = max(self.received, self._reasons[number])


def _write(line: str) -> None:
    """Print from a signal handler, which may have interrupted another print."""
    with suppress(OSError):  # nobody reads it
        os.write(2, f"\n{line}\n".encode())


# ---- the time limit, and the SLURM job


def seconds_left_in_job(environment: Mapping[str, str], margin_minutes: float, now: float) -> float:
    """Seconds until a SLURM job has to be left; infinite where the environment does not tell its end.

    Args:
        environment: of the process. SLURM gives `SLURM_JOB_END_TIME` and `SLURM_JOB_START_TIME`, in Unix time.
        margin_minutes: before the job's end, and never more than a tenth of the job.
        now: in Unix time.
    """
    try:
        end = float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return math.inf
    margin = 60 * margin_minutes
    with suppress(KeyError, ValueError):
        margin = min(margin, MARGIN_FRACTION * (end - float(environment["SLURM_JOB_START_TIME"])))
    return end - margin - now


def deadline(max_minutes: float | None, margin_minutes: float) -> float:
    """The moment to leave, on the clock of `time.monotonic`: the earlier of both; infinite where there is neither."""
    own = math.inf if max_minutes is None else time.monotonic() - process_age() + 60 * max_minutes
    return min(own, time.monotonic() + seconds_left_in_job(os.environ, margin_minutes, time.time()))


def job_id(environment: Mapping[str, str]) -> str | None:
    """The id of the job as `scontrol` takes it, of an array's job with its number in the array; None outside SLURM."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def requeue(job: str) -> str:
    """Have SLURM run the job again, and return a line that says so, or why not."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"SLURM job {job} is not requeued ({error.strerror}): {' '.join(command)}"
    if done.returncode:
        answer = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        return f"SLURM job {job} is not requeued ({answer}): {' '.join(command)}"
    return f"SLURM job {job} is requeued"


# ---- the workers of a DataLoader


@contextmanager
def shielded_workers() -> Iterator[None]:
    """Shield the workers that start inside the `with`, forked or spawned, of torch's loader and of torchdata's.

    A terminal, torchrun and SLURM signal every process of a run. A worker that dies of it takes the run along: torch
    raises "DataLoader worker is killed by signal" anywhere in the main process, and no batch comes any more.

    They end when their loader ends them, or when the main process is gone. On systems without `sigwaitinfo`, such as
    macOS, they are not shielded.
    """
    with ExitStack() as replacements:
        if hasattr(signal, "sigwaitinfo"):
            replacements.enter_context(replaced(worker, "_worker_loop", worker_loop))
            if (stateful := sys.modules.get(_STATEFUL)) is not None:
                replacements.enter_context(replaced(stateful, "_worker_loop", stateful_worker_loop))
        yield


def worker_loop(*args: Any) -> None:
    """What a shielded worker runs. A function of a module, so that a spawned process finds it."""
    _shield()
    _torch_loop(*args)


def stateful_worker_loop(*args: Any) -> None:
    """The same for torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader.worker import _worker_loop

    _shield()
    _worker_loop(*args)


def _shield() -> None:
    """Block the signals in this process, and end it when its parent sends SIGTERM, as a loader does in the end."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the threads that start later, too

    def obey_parent() -> None:
        while True:
            info = signal.sigwaitinfo(signals)
            if info.si_signo == signal.SIGTERM and info.si_pid == parent:
                os._exit(0)  # torch's own handler for it does the same

    threading.Thread(target=obey_parent, daemon=True, name="obey-parent").start()
