"""The curves of a comparison over an axis, and how a terminal shows them. Imports no torch.

A curve is that of a run, or the mean of a group; the limits show the ends of all.
"""

import shutil
from collections.abc import Iterator

import numpy as np

from lightning_tricks.logs.compare.compared_run import axis_text
from lightning_tricks.logs.compare.comparison import Comparison
from lightning_tricks.logs.page import Curve, limits, thinned
from lightning_tricks.logs.table import human, unit
from lightning_tricks.logs.terminal import TO_ASCII, shows_color, shows_unicode

_BEGIN = 0.1  # of the axis: what is higher there may be above the frame
_HEIGHT, _LEAST_WIDTH, _LABELS = 9, 20, 14  # lines; columns; columns right of the plot for its numbers
_MOST_CURVES = 6  # that uniplot draws with different letters


def run_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each run."""
    alone = len(found.groups) == 1
    curves = []
    for number, group in enumerate(found.groups):
        for place, run in enumerate(group.runs):
            outcome = thinned(found.outcomes[run.name].finite())
            label = run.name if alone else group.letter
            x = found.places(run, axis, outcome)
            curves.append(Curve(place if alone else number, label, x, outcome.values))
    return curves


def group_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each group: the mean of its runs where all of them have values; for one group, each run's."""
    curves = run_curves(found, axis)
    if len(found.groups) == 1:
        return curves
    return [_mean([curve for curve in curves if curve.group == number]) for number in range(len(found.groups))]


def _mean(curves: list[Curve]) -> Curve:
    known = [curve for curve in curves if len(curve.x)]
    if len(known) < 2:
        return known[0] if known else curves[0]
    low, high = max(curve.x[0] for curve in known), min(curve.x[-1] for curve in known)
    x = np.unique(np.concatenate([curve.x for curve in known]))
    x = x[(x >= low) & (x <= high)]
    if len(x) < 2:  # over hours, one run may have ended before another began to validate
        return known[0]
    return Curve(known[0].group, known[0].label, x, np.mean([np.interp(x, each.x, each.y) for each in known], axis=0))


def ends_shown(curves: list[Curve]) -> tuple[float, float]:
    """The lowest and the highest value to show: of what comes after the first tenth of the axis."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=1.0)
    later = [curve.y[curve.x >= _BEGIN * end] for curve in curves]
    return limits(np.concatenate([*later, *(curve.y[-1:] for curve in curves)]))


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

    low, high = ends_shown(curves)
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
