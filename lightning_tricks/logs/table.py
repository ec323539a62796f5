"""Tables and figures as text: the one printer of all that is said of logs. Imports no torch."""

from collections.abc import Collection, Sequence
from typing import Any

from lightning_tricks._core.quote import html_text, printable

Table = list[list[str]]  # rows of cells; the first row has the heads


def setting_text(value: Any) -> str:
    """A setting on one line."""
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def shortened(text: str, longest: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def lines_of(table: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The rows of a table as lines; columns in `left` begin at the left."""
    table = [[printable(cell) for cell in row] for row in table]  # of names that are not ours
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def html_table(table: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """The same in HTML.

    Args:
        table: rows of cells, the first of heads.
        classes: of the swatches of color before the rows, if they have some.
    """
    head, *rows = ([html_text(cell) for cell in row] for row in table)
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    swatches = [f'<i class="{name}"></i>' for name in classes] or [""] * len(rows)
    body = "".join(
        f"<tr><th>{swatch}{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"
        for swatch, (first, *others) in zip(swatches, rows, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def human(number: float) -> str:
    """A count in three digits, such as `15.6T`."""
    size, letter = unit(number)
    return f"{number / size:.3g}{letter}"


def unit(number: float) -> tuple[float, str]:
    """The size of the thousands that a count is shown in, and its letter."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((one for one in units if abs(number) >= one[0] * 0.9995), (1.0, ""))
