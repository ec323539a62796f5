"""The request for a decay: a file in the run's folder, or a signal to one of its processes."""

import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._lightning import rank_zero_info, rank_zero_warn
from lightning_tricks._trainer import slurm_environment

FILE = "decay"  # in the run's folder
SIGNAL = getattr(signal, "SIGUSR2", None)  # None on Windows
_CONTENT = re.compile(r"(\d+)(?: from step (\d+))?")


@dataclass(frozen=True)
class Decay:
    """A decay that was asked for: its first step, counted from 0, and its length in optimizer steps."""

    start: int
    steps: int

    @property
    def end(self) -> int:
        """Optimizer steps in the whole run."""
        return self.start + self.steps


class DecayFile:
    """The file that asks for a decay; when the decay has started, it tells a resume when that was.

    Args:
        folder: of the run; an address of a bucket has no such file.
    """

    def __init__(self, folder: str) -> None:
        self.path = None if "://" in folder else Path(folder) / FILE
        self._was_empty = False
        self._refused = ""  # content that was refused

    def exists(self) -> bool:
        """Whether there is a file."""
        return self.path is not None and self.path.exists()

    def asks(self, default: int) -> int:
        """Length of the decay that the file asks for, `default` if it is empty; 0 without a request.

        An empty file counts when it is empty the second time: it may just be about to be written.
        """
        text = self._text()
        if text is None:
            return 0
        if not text:
            was_empty, self._was_empty = self._was_empty, True
            return default if was_empty else 0
        found = _CONTENT.fullmatch(text)
        if found and found[2] is None and int(found[1]) > 0:
            return int(found[1])
        if text != self._refused:
            self._refused = text
            rank_zero_warn(
                f"DecayOnDemand: {self.path} holds {text[:40]!r}: write the length of the decay in optimizer steps, 1 "
                "or more, or leave the file empty"
            )
        return 0

    def started(self) -> Decay | None:
        """The decay that a run in this folder has started; None where the file does not tell of one."""
        found = _CONTENT.fullmatch(self._text() or "")
        return Decay(int(found[2]), int(found[1])) if found and found[2] else None

    def write(self, decay: Decay) -> None:
        """Tell later starts of the run that the decay has started."""
        if self.path is None:
            return
        new = self.path.with_name(f".{FILE}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(f"{decay.steps} from step {decay.start}\n", encoding="utf-8")
            new.replace(self.path)
        except OSError as error:
            rank_zero_warn(
                f"DecayOnDemand: {self.path} cannot be written ({error.strerror}): a resume from a checkpoint before "
                f"step {decay.start} will not decay by itself"
            )

    def _text(self) -> str | None:
        """The content without the space around it; None where there is no file that can be read."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").strip() if self.path is not None else None
        except OSError:
            return None


class DecaySignal:
    """Notes SIGUSR2 in the process that installed it; left alone where the program or SLURM uses it."""

    def __init__(self) -> None:
        self.received = False
        self._process = os.getpid()

    def install(self, trainer: Any) -> None:
        """Take the signal over; no effect outside the main thread, where Python allows no handlers."""
        if SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        requeues = getattr(slurm_environment(trainer), "requeue_signal", None) == SIGNAL
        if requeues or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            rank_zero_info("DecayOnDemand: SIGUSR2 is in use already, so only the file asks for the decay")
            return
        signal.signal(SIGNAL, self._note)

    def restore(self) -> None:
        """Give the signal back, unless somebody else has taken it since. Idempotent."""
        main = threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and main and signal.getsignal(SIGNAL) == self._note:
            signal.signal(SIGNAL, signal.SIG_DFL)

    def _note(self, number: int, frame: Any) -> None:
        self.received |= os.getpid() == self._process  # not in a loader's worker, which was forked with the handler
