"""The one exception for a user's mistake: its message is a single line, and the command line prints only that."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """Bad input: the message names the option, the value it was given and what to do instead.

    The command line prints the message and exits with code 2; from Python it is an ordinary `ValueError`.
    """


@contextmanager
def one_line_and_exit() -> Iterator[None]:
    """End the process on a user's mistake with its line and exit code 2, on Ctrl-C with 130."""
    try:
        yield
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
