"""What a terminal can show of a plot. Imports nothing that takes time."""

import os
import sys

_UNICODE = "┌─┐│└┘⣿▁"  # what uniplot draws with
TO_ASCII = str.maketrans("┌┐└┘─│▁█", "++++-|_#")


def shows_unicode() -> bool:
    """Whether standard output takes the characters of the curve."""
    try:
        _UNICODE.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shows_color() -> bool:
    """Whether standard output is a terminal whose user has not switched colors off, see https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
