"""The curves of a comparison over an axis, and how a terminal shows them. Imports no torch.

A curve is that of a run, or the mean of a group; the limits show the ends of all.
"""

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.compare.compared_run import axis_text
from lightning_tricks.logs.compare.comparison import Comparison
from lightning_tricks.logs.page import Curve, limits, thinned
from lightning_tricks.logs.table import human, unit
from lightning_tricks.logs.terminal import LEAST_WIDTH, MOST_CURVES, TO_ASCII, draw_curves, shows_color

_BEGIN = 0.1  # of the axis: what is higher there may be above the frame
_HEIGHT, _LABELS = 9, 14  # lines; columns right of the plot for its numbers


def run_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each run, in the color of its group; of one group, each in a color of its own."""
    alone = len(found.groups) == 1
    curves = []
    for number, group in enumerate(found.groups):
        for place, run in enumerate(group.runs):
            outcome, label = thinned(found.outcomes[run.name].finite()), run.name if alone else group.letter
            x = found.places(run, axis, outcome)
            curves.append(Curve(place if alone else number, label, x, outcome.values))
    return curves


def group_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each group: the mean of its runs where all of them have values; for one group, each run's."""
    curves = [curve for curve in run_curves(found, axis) if len(curve.x)]
    if len(found.groups) == 1:
        return curves
    parts = ([curve for curve in curves if curve.group == number] for number in range(len(found.groups)))
    return [_mean(part) for part in parts if part]


def _mean(curves: list[Curve]) -> Curve:
    low, high = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= low) & (x <= high)]
    if len(x) < 2:  # over hours, one run may have ended before another began to validate
        return curves[0]
    return Curve(
        curves[0].group, curves[0].label, x, np.mean([np.interp(x, each.x, each.y) for each in curves], axis=0)
    )


def ends_shown(curves: list[Curve]) -> tuple[float, float]:
    """The lowest and the highest value to show: of what comes after the first tenth of the axis."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=1.0)
    later = [curve.y[curve.x >= _BEGIN * end] for curve in curves]
    return limits(np.concatenate([*later, *(curve.y[-1:] for curve in curves)]))


def draw_in_terminal(found: Comparison, columns: int, unicode: bool) -> list[str]:
    """A plot for each axis that shows something of its own, as lines; one line where uniplot is not installed.

    Args:
        found: the comparison.
        columns: width of the terminal.
        unicode: whether it shows more than ASCII.
    """
    lines: list[str] = []
    for axis in found.known:
        each = None if axis in ("steps", "hours") else found.amount_of_step(axis)
        curves = [curve for curve in group_curves(found, axis) if len(curve.x) > 1][:MOST_CURVES]
        if each is not None:
            lines.append(f"over {axis_text(axis)}: as over steps, {human(each)} a step")
        elif curves:
            try:
                lines += [f"{found.metric} over {axis_text(axis)}", *_plot(curves, columns)]
            except UsageError as error:
                return [str(error)]
    return lines if unicode else [line.translate(TO_ASCII) for line in lines]


def _plot(curves: list[Curve], columns: int) -> list[str]:
    low, high = ends_shown(curves)
    size, letter = unit(max(float(curve.x[-1]) for curve in curves))
    return draw_curves(
        [(curve.label, (curve.x / size).tolist(), curve.y.tolist()) for curve in curves],
        width=max(columns - _LABELS, LEAST_WIDTH),
        height=_HEIGHT,
        x_unit=letter,
        y_min=low,
        y_max=high,
        x_gridlines=[],
        character_set="ascii",
        color=shows_color(),
    )
