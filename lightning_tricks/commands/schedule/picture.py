"""A plan as PNG or SVG, drawn by matplotlib: learning rate above; batch, tokens and weight decay below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.commands.schedule.curves import (
    Axis,
    Line,
    NamedPlan,
    decay_lines,
    lr_lines,
    place_of,
    positions,
)
from lightning_tricks.logs.page import DARK, LIGHT
from lightning_tricks.logs.table import human

FORMATS = (".png", ".svg")
_STYLES = ["-", "--"]  # of the first recipe, and of the one laid over it
_MOST_TICKS = 200  # of validations or checkpoints; more would be a bar
_LETTER, _ROW = 0.0115, 0.045  # width of a letter over the axis, and height of a line, as shares of it


def draw_picture(
    plans: Sequence[NamedPlan],
    files: Sequence[Path],
    *,
    axis: Axis = "steps",
    constant: bool = False,
    present: int | None = None,
    dark: bool = False,
) -> None:
    """Write a picture of the plans to each file, whose ending says in which format.

    Args:
        plans: the first one has the marks.
        files: that end in .png or .svg.
        axis: what the curves are drawn over.
        constant: whether to draw the constant learning rate at the first plan's peak.
        present: number of optimizer steps that a run has done.
        dark: colors for a dark page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("schedule: a picture needs matplotlib: pip install 'lightning-tricks[plot]'") from None
    look: dict[str, Any] = DARK if dark else LIGHT
    with mpl.rc_context(style(look)):
        for file in files:  # each from a new figure: the layout after a first one would be slightly another
            figure = Figure(figsize=(9, 6.4), layout="constrained")
            _draw(figure, plans, axis, constant, present, look)
            options: dict[str, Any] = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 144}
            figure.savefig(file, **options)


def _draw(
    figure: Any, plans: Sequence[NamedPlan], axis: Axis, constant: bool, present: int | None, look: dict[str, Any]
) -> None:
    rows = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [3.6, 1, 1, 1]})
    top, batch, tokens, decay = rows
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    end = max(positions(named.plan, axis)[-1] for named in plans)
    top.set_xlim(-0.01 * end, 1.01 * end)
    _draw_lines(top, lr_lines(plans, axis, constant), look)
    _draw_marks(top, [batch, tokens, decay], plans[0].plan, axis, present, look)
    top.set_ylabel("learning rate")
    top.set_ylim(bottom=0.0)
    top.legend(title="learning rate of groups", **beside)
    _draw_counts(batch, plans, "batch_tokens", axis, look)
    _draw_counts(tokens, plans, "tokens", axis, look)
    batch.set_ylabel("batch,\ntokens")
    tokens.set_ylabel("tokens\nso far")
    _draw_lines(decay, decay_lines(plans, axis), look)
    decay.set_ylabel("weight\ndecay")
    decay.set_ylim(*_around_zero(decay.get_ylim()[1]))
    decay.legend(title="weight decay of groups", **beside)
    decay.set_xlabel("optimizer step" if axis == "steps" else "tokens")
    decay.xaxis.set_major_formatter(lambda value, _: human(value) if value else "0")
    figure.suptitle(_title(plans), x=0.01, ha="left")
    for each in rows:
        each.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()


def _title(plans: Sequence[NamedPlan]) -> str:
    """Each recipe with its length."""
    lengths = []
    for named in plans:
        tokens = named.plan.total_tokens
        lengths.append(
            f"{named.name}: {named.plan.total_steps:,} steps" + ("" if tokens is None else f", {human(tokens)} tokens")
        )
    return "; against ".join(lengths)


def _around_zero(highest: float) -> tuple[float, float]:
    """Limits of an axis on which a line at 0 can be seen."""
    return (-0.08 * highest, 1.1 * highest) if highest > 0 else (-0.1, 1.0)


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


def _draw_lines(where: Any, lines: Sequence[Line], look: dict[str, Any]) -> None:
    """Each line in a color of its own; those of the second recipe are dashed, in the colors of the first's."""
    numbers: dict[int, int] = {}
    for line in lines:
        if line.recipe < 0:
            where.plot(line.x, line.y, ":", color=look["ink"], linewidth=1.2, label=line.label)
            continue
        number = numbers[line.recipe] = numbers.get(line.recipe, -1) + 1
        color = look["lines"][number % len(look["lines"])]
        style = _STYLES[line.recipe % len(_STYLES)]
        where.plot(line.x, line.y, style, color=color, linewidth=1.6, label=line.label)


def _draw_counts(where: Any, plans: Sequence[NamedPlan], name: str, axis: Axis, look: dict[str, Any]) -> None:
    for number, named in enumerate(plans):
        values = getattr(named.plan, name)
        if values is None:
            where.text(0.5, 0.5, "not known", ha="center", va="center", transform=where.transAxes)
            continue
        style = _STYLES[number % len(_STYLES)]
        drawn = "steps-post" if name == "batch_tokens" else "default"
        x = positions(named.plan, axis)
        where.plot(x, values, style, color=look["lines"][0], linewidth=1.6, drawstyle=drawn)
    where.set_ylim(bottom=0.0)
    where.yaxis.set_major_formatter(lambda value, _: human(value) if value else "0")


def _draw_marks(
    top: Any, others: Sequence[Any], plan: Any, axis: Axis, present: int | None, look: dict[str, Any]
) -> None:
    """Lines with names at the first step of each phase and at the present one; ticks for validations and saves."""
    marks = [(place_of(plan, phase.step, axis), phase.name, look["ink"]) for phase in plan.phases[:-1]]
    if present is not None:
        marks.append((place_of(plan, present, axis), f"now, step {present:,}", look["lines"][3]))
    left, right = top.get_xlim()
    ends: list[float] = []  # of the rows of names over the axis, as shares of it
    for place, name, color in sorted(marks):
        if place > 0:
            for each in (top, *others):
                each.axvline(place, color=color, linewidth=1.0, alpha=0.6, zorder=1)
        share, width = (place - left) / (right - left), _LETTER * (len(name) + 1)
        begin = min(share, 1 - width)
        row = next((number for number, end in enumerate(ends) if end <= begin), len(ends))
        ends[row : row + 1] = [begin + width]
        top.text(begin, 1.01 + _ROW * row, name, color=color, transform=top.transAxes)
    kinds = [
        ("validation", plan.validations, 0.05, look["lines"][4]),
        ("checkpoint", plan.checkpoints, 0.02, look["lines"][5]),
        ("kept for ever", plan.permanent, 0.02, look["ink"]),
    ]
    for name, steps, height, color in kinds:
        if not steps:
            continue
        shown = steps[:: -(-len(steps) // _MOST_TICKS)]
        x = [place_of(plan, step, axis) for step in shown]
        every = "" if len(shown) == len(steps) else f", every {-(-len(steps) // _MOST_TICKS)}th drawn"
        label = f"{name} ({len(steps):,}{every})"
        at = top.get_xaxis_transform()
        top.plot(x, [height] * len(x), "|", color=color, markersize=7, transform=at, label=label)
