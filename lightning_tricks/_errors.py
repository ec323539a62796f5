"""The one exception for a user's mistake: its message is a single line, and the command line prints only that."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class UsageError(ValueError):
    """Bad input: the message names the option, the value it was given and what to do instead.

    The command line prints the message and exits with code 2; from Python it is an ordinary `ValueError`.
    """


@contextmanager
def one_line_and_exit() -> Iterator[None]:
    """End the process on a user's mistake with its line and exit code 2, on Ctrl-C with 130.

    If nobody reads the output any more, as after `| head`, it ends without a word and with 141, as other programs do.
    """
    try:
        yield
        sys.stdout.flush()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # which may be of another pipe, such as that of a loader's process
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
        sys.exit(141)


def _reader_is_gone() -> bool:
    """Whether the standard output is a pipe of which the other end is closed."""
    with suppress(OSError, ValueError):  # it has no descriptor
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # asks for errors alone
        return bool(poll.poll(0))
    return False
