"""Tables, figures and curves as text, for a terminal: the one printer of all that is said of logs. Imports no torch."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lightning_tricks._core.errors import PIP_EXTRA, UsageError
from lightning_tricks._core.quote import html_text, printable
from lightning_tricks._core.terminal import colored, width

MOST_CURVES = 6  # that uniplot can draw with different letters
LEAST_WIDTH = 20
_UNICODE = "┌─┐│└┘⣿▁"  # what uniplot draws with
TO_ASCII = str.maketrans("┌┐└┘─│▁█", "++++-|_#")

Table = list[list[str]]  # rows of cells; the first row has the heads
Style = Callable[[int, int], str | None]  # of the cell in a row and column, see `colored`


def setting_text(value: Any) -> str:
    """A setting on one line."""
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def shortened(text: str, longest: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def lines_of(table: Sequence[Sequence[str]], left: Collection[int] = (0,), style: Style = lambda *_: None) -> list[str]:
    """The rows of a table as lines; columns in `left` begin at the left, `style` tells the colour of a cell."""
    table = [[printable(cell) for cell in row] for row in table]  # of names that are not ours
    widths = [max(width(row[column]) for row in table) for column in range(len(table[0]))]

    def aligned(number: int, column: int, cell: str) -> str:
        blanks, shown = " " * (widths[column] - width(cell)), colored(cell, style(number, column))
        return shown + blanks if column in left else blanks + shown

    return [
        "  ".join(aligned(number, column, cell) for column, cell in enumerate(row)).rstrip()
        for number, row in enumerate(table)
    ]


def html_table(table: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """The same in HTML; columns in `left` begin at the left too. On a phone each cell has its head before it."""
    head, *rows = ([html_text(cell).replace("± ", "±&nbsp;") for cell in row] for row in table)
    sides = [' class="left"' * (column in left) for column in range(len(head))]
    cells = "".join(f"<th{side}>{name}</th>" for name, side in zip(head, sides, strict=True))
    body = ""
    for row in rows:
        columns = list(zip(head, sides, row, strict=True))[1:]
        others = "".join(f'<td data-head="{name}"{side}>{cell}</td>' for name, side, cell in columns)
        body += f"<tr><th>{row[0]}</th>{others}</tr>"
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def human(number: float) -> str:
    """A count in three digits, such as `15.6T`."""
    size, letter = unit(number)
    return f"{number / size:.3g}{letter}"


def unit(number: float) -> tuple[float, str]:
    """The size of the thousands that a count is shown in, and its letter."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((one for one in units if abs(number) >= one[0] * 0.9995), (1.0, ""))


def size_text(size: float) -> str:
    """Bytes in a unit that fits, such as `1.50 GiB`."""
    power, name = next((unit for unit in ((30, "GiB"), (20, "MiB")) if size >= 2 ** unit[0]), (10, "KiB"))
    return f"{size / 2**power:,.2f} {name}"


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
        raise UsageError(f"a curve in a terminal needs uniplot: {PIP_EXTRA.format('plot')}") from None
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
