"""Curves in a terminal, drawn by uniplot, and what the terminal can show. Imports nothing that takes time."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_tricks._core.errors import UsageError

MOST_CURVES = 6  # that uniplot can draw with different letters
LEAST_WIDTH = 20
_UNICODE = "┌─┐│└┘⣿▁"  # what uniplot draws with
TO_ASCII = str.maketrans("┌┐└┘─│▁█", "++++-|_#")


def draw_curves(curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], **options: Any) -> list[str]:
    """Curves as lines of text, with a frame, the numbers of both axes and a legend.

    Args:
        curves: label, x and y of each, at most 6; labels must differ, as uniplot joins series of one name.
        options: of uniplot, such as the size and the limits.

    Raises:
        UsageError: uniplot is not installed.
    """
    try:
        from uniplot import plot_to_string
    except ImportError:
        raise UsageError("a curve in a terminal needs uniplot: pip install 'lightning-tricks[plot]'") from None
    labels, xs, ys = (list(part) for part in zip(*curves, strict=True))
    text = plot_to_string(ys=ys, xs=xs, legend_labels=labels, lines=True, y_gridlines=[], **options)
    rows = text if isinstance(text, list) else str(text).split("\n")
    return [row.rstrip() for row in rows if row.strip()]


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
