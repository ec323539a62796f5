"""The curves of a comparison in a terminal, drawn by uniplot."""

import shutil
from collections.abc import Iterator

from lightning_tricks.commands.compare.compared_run import axis_text
from lightning_tricks.commands.compare.comparison import Comparison
from lightning_tricks.commands.compare.curves import Curve, group_curves, limits
from lightning_tricks.commands.schedule.curves import human, unit
from lightning_tricks.commands.schedule.terminal import TO_ASCII, shows_color, shows_unicode

_HEIGHT, _LEAST_WIDTH, _LABELS = 9, 20, 14  # lines; columns; columns right of the plot for its numbers
_MOST_CURVES = 6  # that uniplot draws with different letters


def draw_in_terminal(found: Comparison, columns: int | None = None, unicode: bool | None = None) -> list[str]:
    """A plot for each axis that shows something of its own, as lines; one line where uniplot is not installed.

    Args:
        found: the comparison.
        columns: width; None for that of the terminal.
        unicode: whether it shows more than ASCII; None to find out.
    """
    try:
        import uniplot  # noqa: F401
    except ImportError:
        return ["the curves in a terminal need uniplot: pip install 'lightning-tricks[plot]'"]
    columns = shutil.get_terminal_size((80, 24)).columns if columns is None else columns
    unicode = shows_unicode() if unicode is None else unicode
    lines: list[str] = []
    for axis in found.known:
        each = None if axis in ("steps", "hours") else found.amount_of_step(axis)
        word = axis_text(axis)
        if each is not None:
            lines.append(f"over {word}: as over steps, {human(each)} a step")
            continue
        curves = [curve for curve in group_curves(found, axis) if len(curve.x) > 1][:_MOST_CURVES]
        if curves:
            lines += [f"{found.metric} over {word}", *_plot(curves, columns)]
    return lines if unicode else [line.translate(TO_ASCII) for line in lines]


def _plot(curves: list[Curve], columns: int) -> Iterator[str]:
    from uniplot import plot_to_string

    low, high = limits(curves)
    size, letter = unit(max(float(curve.x[-1]) for curve in curves))
    text = plot_to_string(
        ys=[curve.y.tolist() for curve in curves],
        xs=[(curve.x / size).tolist() for curve in curves],
        lines=True,
        width=max(columns - _LABELS, _LEAST_WIDTH),
        height=_HEIGHT,
        x_unit=letter,
        y_min=low,
        y_max=high,
        y_gridlines=[],
        x_gridlines=[],
        legend_labels=[curve.label for curve in curves],
        character_set="ascii",
        color=shows_color(),
    )
    rows = text if isinstance(text, list) else str(text).split("\n")
    yield from (row.rstrip() for row in rows if row.strip())
