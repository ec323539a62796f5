"""The curves of a comparison as one PNG, drawn by matplotlib: a field for each axis."""

from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.commands.compare.compared_run import axis_text
from lightning_tricks.commands.compare.comparison import Comparison
from lightning_tricks.commands.compare.curves import limits, run_curves
from lightning_tricks.commands.compare.report import verdicts
from lightning_tricks.commands.schedule.curves import human
from lightning_tricks.commands.schedule.picture import DARK, LIGHT, style

_STYLES = ("-", "--", ":")  # of the first six groups, the next six, and so on
_TITLE, _MOST_LINES = 110, 3  # characters of a verdict in a line, and verdicts over the picture


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
        lines = [line if len(line) <= _TITLE else line[: _TITLE - 3] + "..." for line in said]
        figure.suptitle("\n".join(lines), x=0.01, ha="left")
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
