"""The curves of a comparison over an axis, drawn in a terminal by uniplot or as a PNG by matplotlib.

A curve is that of a run, or the mean of a group; the limits show the ends of all.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks._errors import UsageError
from lightning_tricks.commands.compare.compared_run import axis_text
from lightning_tricks.commands.compare.comparison import Comparison
from lightning_tricks.commands.compare.report import verdicts
from lightning_tricks.commands.runs.table import shortened
from lightning_tricks.commands.schedule.curves import human, unit
from lightning_tricks.commands.schedule.terminal import TO_ASCII, shows_color, shows_unicode
from lightning_tricks.monitors.doctor.run_log import Floats

_MOST_POINTS = 400  # of one curve in a picture
_BEGIN = 0.1  # of the axis: what is higher there may be above the frame
_MARGIN = 0.06  # of the height


@dataclass(frozen=True)
class Curve:
    """One curve.

    Args:
        group: number of its group, from 0.
        label: the group's letter, or the run's name where there is one group.
        x: (n,) amounts.
        y: (n,) finite values.
    """

    group: int
    label: str
    x: Floats
    y: Floats


def run_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each run."""
    alone = len(found.groups) == 1
    curves = []
    for number, group in enumerate(found.groups):
        for place, run in enumerate(group.runs):
            label = run.name if alone else group.letter
            curves.append(_curve(found, place if alone else number, label, axis, run.name))
    return curves


def group_curves(found: Comparison, axis: str) -> list[Curve]:
    """A curve for each group: the mean of its runs where all of them have values; for one group, each run's."""
    curves = run_curves(found, axis)
    if len(found.groups) == 1:
        return curves
    return [_mean([curve for curve in curves if curve.group == number]) for number in range(len(found.groups))]


def _curve(found: Comparison, group: int, label: str, axis: str, name: str) -> Curve:
    run = next(run for run in found.runs if run.name == name)
    outcome = found.outcomes[name]
    number, end = np.arange(len(outcome)), len(outcome) - 1
    kept = np.isfinite(outcome.values) & ((number % math.ceil(len(outcome) / _MOST_POINTS) == 0) | (number == end))
    return Curve(group, label, found.places(run, axis)[kept], outcome.values[kept])


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


def limits(curves: list[Curve]) -> tuple[float, float]:
    """The lowest and the highest value to show: of what comes after the first tenth of the axis."""
    end = max((float(curve.x[-1]) for curve in curves if len(curve.x)), default=1.0)
    later = [curve.y[curve.x >= _BEGIN * end] for curve in curves]
    values = np.concatenate([*later, *(curve.y[-1:] for curve in curves)])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = _MARGIN * (high - low) or max(abs(low) * _MARGIN, 1e-6)
    return low - margin, high + margin


# ---- in a terminal

_HEIGHT, _LEAST_WIDTH, _LABELS = 9, 20, 14  # lines; columns; columns right of the plot for its numbers
LIGHT = {
    "ink": "#1f2328",
    "faint": "#d1d9e0",
    "paper": "#ffffff",
    "lines": ["#0969da", "#bc4c00", "#1a7f37", "#bf3989", "#8250df", "#9a6700"],
}
DARK = {
    "ink": "#e6edf3",
    "faint": "#3d444d",
    "paper": "#0d1117",
    "lines": ["#58a6ff", "#f0883e", "#3fb950", "#f778ba", "#bc8cff", "#d29922"],
}
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


# ---- as a PNG

_STYLES = ("-", "--", ":")  # of the first six groups, the next six, and so on
_TITLE, _MOST_LINES = 110, 3  # characters of a verdict in a line, and verdicts over the picture


def style(look: dict[str, Any]) -> Any:
    """Settings of matplotlib for pictures in these colors."""
    ink = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    paper = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    return {
        **dict.fromkeys(ink, look["ink"]),
        **dict.fromkeys(paper, look["paper"]),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": look["faint"],
        "grid.linewidth": 0.6,
        "legend.edgecolor": look["faint"],
        "legend.fontsize": 8,
        "legend.title_fontsize": 8,
        "figure.titlesize": 11,
        "font.size": 9,
        "svg.hashsalt": "schedule",  # so that the same plan gives the same file
    }


def draw_picture(found: Comparison, file: Path, dark: bool = False) -> None:
    """Write the curves of all runs to a file, in the colors of their groups.

    Args:
        found: the comparison.
        file: that ends in .png or .svg.
        dark: colors for a dark page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("compare: a picture needs matplotlib: pip install 'lightning-tricks[plot]'") from None
    look: dict[str, Any] = DARK if dark else LIGHT
    with mpl.rc_context(style(look)):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        fields = figure.subplots(2, 2).flat
        for field, axis in zip(fields, found.known, strict=False):
            _draw(field, found, axis, look)
        for field in list(fields)[len(found.known) :]:
            field.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(once.values(), once.keys(), loc="outside right upper")
        said = [line.partition(" (")[0] for line in verdicts(found)[:_MOST_LINES]]
        figure.suptitle("\n".join(shortened(line, _TITLE) for line in said), x=0.01, ha="left")
        options: dict[str, Any] = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 144}
        figure.savefig(file, **options)


def _draw(field: Any, found: Comparison, axis: str, look: dict[str, Any]) -> None:
    curves = run_curves(found, axis)
    colors = look["lines"]
    for curve in curves:
        stroke = _STYLES[curve.group // len(colors) % len(_STYLES)]
        field.plot(
            curve.x,
            curve.y,
            stroke,
            color=colors[curve.group % len(colors)],
            linewidth=1.2,
            alpha=0.85,
            label=curve.label,
        )
    field.set_ylim(*limits(curves))
    field.set_xlabel(axis_text(axis))
    field.set_ylabel(found.metric)
    if axis != "hours":
        field.xaxis.set_major_formatter(lambda value, _: human(value) if value else "0")
    field.spines[["top", "right"]].set_visible(False)
