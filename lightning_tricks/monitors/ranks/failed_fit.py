"""After the exception of a fit: find out whether another rank caused it, and end the process in time."""

import re
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

from lightning_tricks._exit import end_within
from lightning_tricks._trainer import running_call

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


def _chain(error: BaseException, only_causes: bool = False) -> Iterator[BaseException]:
    """An exception and those it came from: by `raise ... from`, or also those that were handled when it was raised."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or (None if only_causes else each.__context__)


class RunningFit:
    """The call of a Trainer's `fit`, `validate`, `test` or `predict` that this thread is in, told apart from any other.

    Lightning makes a new bound method for each such call, which identifies it. The reference to that method is weak, so
    that the objects of a failed fit are freed as they would be without this.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        methods = map(running_call, _outwards(sys._getframe()))
        method = next((each for each in methods if each is not None), None)
        self._method = None if method is None else weakref.ref(method, lambda _: ExceptHook.withdraw())

    def over(self) -> bool:
        """Whether the call has ended and its exception, if any, is dropped."""
        return self._method is None or self._method() is None

    def stack(self) -> list[str] | None:
        """The stack of the call at this moment, as text; None when the call has ended."""
        innermost = sys._current_frames().get(self._thread)
        return traceback.format_stack(innermost) if self._is_in(_outwards(innermost)) else None

    def raised(self, error: BaseException) -> bool:
        """Whether an exception came out of the call."""
        return self._is_in(frame for frame, _ in traceback.walk_tb(error.__traceback__))

    def _is_in(self, frames: Iterable[FrameType]) -> bool:
        method = None if self._method is None else self._method()
        return method is not None and any(running_call(frame) is method for frame in frames)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class ExceptHook:
    """A `sys.excepthook` for an uncaught exception: may hide its traceback, and lets no process hang after it.

    It acts on the exceptions of one fit. When the program has dropped them, `sys.excepthook` is what it was before.

    Args:
        fit: the call whose exceptions it acts on.
        hide: print no traceback, because the exception is only a consequence.
        seconds: how long to wait for `children`.
        children: processes that Lightning's launcher has started; only their parent can notice their end.
    """

    def __init__(self, fit: RunningFit, hide: bool, seconds: float, children: list[subprocess.Popen]) -> None:
        self._fit, self._hide, self._seconds, self._children = fit, hide, seconds, children
        self._before: Callable[..., Any] = sys.excepthook

    def install(self) -> None:
        """Become `sys.excepthook`."""
        sys.excepthook = self

    @staticmethod
    def withdraw() -> None:
        """Put back the hook from before the fits that are over; a hook that other code has wrapped stays."""
        while isinstance(sys.excepthook, ExceptHook) and sys.excepthook._fit.over():
            sys.excepthook = sys.excepthook._before

    def __call__(self, kind: Any, error: BaseException, trace: Any) -> None:
        """Show the exception unless it is to be hidden, and see that the process ends."""
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
