"""The one exception for a user's mistake: its message is a single line, and the command line prints only that."""

import errno
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

from lightning_tricks._core.quote import error_line
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.terminal import ERASE_LINE, colored

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_READER = 141  # exit code of a program of a shell that SIGPIPE has ended: 128 + 13
PIP_EXTRA = "pip install -e '.[{}]' in the clone"  # how an extra of the collection is installed, which is on no index


class UsageError(ValueError):
    """Bad input: the message names the option, the value it was given and what to do instead.

    The command line prints the message and exits with code 2; from Python it is an ordinary `ValueError`.
    """


class OneLineWarning(UserWarning):
    """A warning of the collection, which the command line prints as `warning: ...`, without a source path."""


def check_choice(option: str, value: Any, choices: Any, more: str = "") -> None:
    """Refuse a value that is none of a Literal's.

    Args:
        option: its name for the user, such as `Float8.recipe`.
        value: that was given.
        choices: the Literal.
        more: what else may be given, for the message.
    """
    if value not in get_args(choices):
        raise UsageError(f"{option}={value!r}: give one of {', '.join(get_args(choices))}{more}")


def check_count(option: str, value: Any, more: str = "") -> None:
    """Refuse a value that is no whole number of at least 1; `option` and `more` as in `check_choice`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{option}={value!r}: give a whole number of at least 1{more}")


@contextmanager
def one_line_and_exit() -> Iterator[None]:
    """End the process on a user's mistake or a full disk with a line and exit code 2, on Ctrl-C with 130.

    Where nobody reads its output any more, as behind `| head`, it ends with 141 and without a line. Until then, the
    collection's warnings are lines too.
    """
    try:
        try:
            with replaced(warnings, "showwarning", _in_one_line(warnings.showwarning)):
                yield
        except SystemExit:
            _flush()
            raise
        _flush()
    except UsageError as error:
        _say("error:", "red", error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if not _has_no_reader(sys.stdout):
            raise  # of another pipe, such as that to a process of a loader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        sys.exit(_NO_READER)
    except OSError as error:
        if (line := disk_full_line(error)) is None:
            raise
        _say("error:", "red", line)
        sys.exit(2)


def _in_one_line(show: Callable[..., None]) -> Callable[..., None]:
    """Shows the collection's warnings as lines, and others as they were shown before."""

    def shown(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **options: Any) -> None:
        if sys.stderr is None or not issubclass(category, OneLineWarning):
            show(message, category, filename, lineno, *rest, **options)
            return
        with suppress(OSError):  # as Python does: a warning that cannot be written ends no run
            if sys.stderr.isatty():
                sys.stderr.write(ERASE_LINE)  # over the progress line, which is drawn again
            _say("warning:", "yellow", *str(message).split("\n"))

    return shown


def _say(word: str, style: str, *lines: object) -> None:
    first, *more = map(error_line, lines)
    print(f"{colored(word, style, sys.stderr)} {first}", *more, sep="\n", file=sys.stderr or sys.stdout, flush=True)


def disk_full_line(error: BaseException) -> str | None:
    """The line for a disk, or a user's share of it, that is full; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _DISK_FULL:
        return None
    return f"{error.filename or 'a file'}: {error.strerror}; free some space, or write to another disk"


def _flush() -> None:
    """Write what is still in the buffer of standard output; at the end of the process nothing would catch an error."""
    if sys.stdout is not None and not sys.stdout.closed:  # else the process was started without one
        sys.stdout.flush()


def _has_no_reader(stream: Any) -> bool:
    """Whether a stream is a pipe whose other end is closed."""
    with suppress(OSError, ValueError, AttributeError):  # a stream without a file, or none
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False
