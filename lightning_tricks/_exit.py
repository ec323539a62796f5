"""The end of a process that may hang on its way out."""

import faulthandler
import sys
from contextlib import suppress


def end_within(seconds: float) -> None:
    """End this process after `seconds` if it still runs: a process group may hang at its end when a peer has died."""
    with suppress(RuntimeError, ValueError, OSError):  # no stderr, or one that is no file
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
