"""A comparison as one HTML page without any other file, for light and dark screens."""

import math
from collections.abc import Sequence

import numpy as np

from lightning_tricks._quote import html_text
from lightning_tricks.commands.compare.compared_run import axis_text
from lightning_tricks.commands.compare.comparison import Comparison
from lightning_tricks.commands.compare.curves import DARK, LIGHT, Curve, limits, run_curves
from lightning_tricks.commands.compare.report import (
    Table,
    groups_table,
    notes,
    rows_table,
    settings_table,
    values_table,
    verdicts,
)
from lightning_tricks.commands.schedule.curves import human

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 560, 260, 56, 18, 34  # of a plot, and of its numbers around it
_TICKS = 5


def page(found: Comparison, left_out: Sequence[str]) -> str:
    """The page."""
    lines = "".join(f'<p class="verdict">{html_text(line)}</p>' for line in verdicts(found))
    told = "".join(f"<li>{html_text(line)}</li>" for line in notes(found, left_out))
    settings = settings_table(found)
    parts = [
        lines,
        _table(groups_table(found), swatches=True, single=len(found.groups) == 1),
        _table(values_table(found)),
        _table(pairs) if len(pairs := rows_table(found)) > 1 else "",
        _table(settings) if len(settings) > 1 else "<p>No setting differs.</p>",
        f"<ul>{told}</ul>" if told else "",
        _legend(found),
        '<div class="plots">',
        *(_figure(found, axis) for axis in found.known),
        "</div>",
    ]
    runs = f"{len(found.runs)} runs, {len(found.groups)} group{'s' * (len(found.groups) > 1)}"
    return _PAGE.format(
        title=html_text(f"compare: {runs}"),
        light=_colors(LIGHT),
        dark=_colors(DARK),
        strokes="\n".join(
            f".g{number} {{ stroke: var(--c{number}); }} i.g{number} {{ background: var(--c{number}); }}"
            for number in range(len(LIGHT["lines"]))
        ),
        parts="\n".join(parts),
    )


def _colors(look: dict) -> str:
    lines = " ".join(f"--c{number}: {color};" for number, color in enumerate(look["lines"]))
    return f"--ink: {look['ink']}; --faint: {look['faint']}; --paper: {look['paper']}; {lines}"


def _class(group: int) -> str:
    count = len(LIGHT["lines"])
    return f"g{group % count}" + (" dashed" if group // count % 2 else "")


def _table(table: Table, swatches: bool = False, single: bool = False) -> str:
    head, *rows = table
    cells = "".join(f"<th>{html_text(cell)}</th>" for cell in head)
    body = []
    for number, row in enumerate(rows):
        swatch = f'<i class="{_class(number)}"></i>' if swatches and not single else ""
        first, *others = row
        body.append(
            f"<tr><th>{swatch}{html_text(first)}</th>"
            + "".join(f"<td>{html_text(cell)}</td>" for cell in others)
            + "</tr>"
        )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _legend(found: Comparison) -> str:
    if len(found.groups) > 1:
        names = [f"{group.letter}: {', '.join(run.name for run in group.runs)}" for group in found.groups]
    else:
        names = [run.name for run in found.groups[0].runs]
    items = (f'<span><i class="{_class(n)}"></i>{html_text(name)}</span>' for n, name in enumerate(names))
    return f'<p class="legend">{"".join(items)}</p>'


def _figure(found: Comparison, axis: str) -> str:
    word = axis_text(axis)
    caption = f"{found.metric} over {word}"
    if axis not in ("steps", "hours") and (each := found.amount_of_step(axis)) is not None:
        caption += f", {human(each)} a step in all runs"
    drawn = plot(run_curves(found, axis), axis == "hours")
    return f"<figure><figcaption>{html_text(caption)}</figcaption>{drawn}</figure>"


def plot(curves: list[Curve], small: bool = False) -> str:
    """Curves as an inline SVG with numbers at both axes.

    Args:
        curves: those without a point are left out.
        small: whether amounts are small, such as hours, and not counts.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return "<svg></svg>"
    low, high = limits(curves)
    end = max(float(curve.x[-1]) for curve in curves) or 1.0
    wide, tall = _WIDTH - _LEFT, _HEIGHT - _BELOW

    def x_of(value: float) -> float:
        return _LEFT + value / end * (wide - _RIGHT)

    def y_of(value: float) -> float:
        return tall - (min(value, high + (high - low)) - low) / (high - low) * tall

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in ticks(low, high):
        y = y_of(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.5g}</text>')
    for tick in ticks(0.0, end):
        shown = f"{tick:.3g}" if small or not tick else human(tick)
        parts.append(f'<text x="{x_of(tick):.1f}" y="{tall + 18}" text-anchor="middle">{shown}</text>')
    # what is above the frame is cut off by this inner one
    parts.append(f'<svg x="{_LEFT}" width="{wide}" height="{tall}" viewBox="{_LEFT} 0 {wide} {tall}">')
    for curve in curves:
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True))
        name = f"{curve.label}: {curve.y[-1]:.4f} at the end"
        parts.append(f'<polyline class="{_class(curve.group)}" points="{points}"><title>{html_text(name)}</title>')
        parts.append("</polyline>")
    return "".join([*parts, "</svg></svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, about five.

    Example:
        >>> ticks(0.0, 400.0)
        [0.0, 100.0, 200.0, 300.0, 400.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * (1 - 1e-9))
    numbers = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(number * step) for number in numbers]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); }}
h1 {{ font-size: 1.3rem; }} .verdict {{ font-weight: 600; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; margin: .8rem 0; }}
th, td {{ text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--faint);
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th:first-child {{ text-align: left; }} thead th {{ font-weight: 600; }} tbody th {{ font-weight: 400; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; }} figcaption {{ font-size: 13px; }} svg {{ width: 100%; height: auto; }}
line {{ stroke: var(--faint); }} polyline {{ fill: none; stroke-width: 1.5; }} .dashed {{ stroke-dasharray: 5 3; }}
{strokes}
text {{ font-size: 11px; fill: currentColor; }}
.legend span {{ margin-right: 1.2rem; white-space: nowrap; }}
i {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  border-radius: 2px; vertical-align: -1px; }}
</style></head><body><h1>{title}</h1>
{parts}
</body></html>
"""
