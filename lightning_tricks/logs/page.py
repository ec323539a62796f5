"""One HTML page without any other file, for light and dark screens, with curves as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_tricks._core.quote import html_text
from lightning_tricks.logs.run_log import Floats, Series
from lightning_tricks.logs.table import human

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW = 560, 260, 60, 14, 34  # of a plot, and of its numbers around it
_TICKS, _COLORS, _INSET = 5, 6, 4  # the first point is a whole dot, not cut by the frame
_MOST_POINTS = 800  # of a curve
_FEW_POINTS = 12  # at most, each of which is a dot
_BAD = "<title>not finite: NaN or infinite</title>"
LOG_WORD, _WIDE_SPAN = ", logarithmic", 100.0  # of a caption; largest over smallest value of such an axis
_MARGIN, _LARGEST, _DECADES = 0.06, 1e300, 307.0  # of a plot's height, above and below; what is finite, doubled too


@dataclass(frozen=True)
class Curve:
    """One curve.

    Args:
        group: number of its color, from 0.
        label: its name.
        x: (n,) amounts.
        y: (n,) finite values.
    """

    group: int
    label: str
    x: Floats
    y: Floats


def thinned(series: Series) -> Series:
    """The smallest and the largest value of each of equal parts, at most 800 points."""
    if len(series) <= _MOST_POINTS:
        return series
    size = math.ceil(2 * len(series) / _MOST_POINTS)
    starts = range(0, len(series), size)
    parts = [series.values[start : start + size] for start in starts]
    extremes = (np.argmin, np.argmax)
    kept = sorted({start + int(f(part)) for start, part in zip(starts, parts, strict=True) for f in extremes})
    return Series(series.steps[kept], series.values[kept])


def limits(values: Floats, log: bool = False) -> tuple[float, float]:
    """The ends of an axis for these values, logarithmic or not, with a margin."""
    if not len(values):
        return 0.0, 1.0
    if log:
        low, high = limits(np.log10(values))
        return 10.0 ** max(low, -_DECADES), 10.0 ** min(high, _DECADES)
    low, high = max(float(values.min()), -_LARGEST), min(float(values.max()), _LARGEST)
    margin = _MARGIN * (high - low) or max(abs(low) * _MARGIN, 1e-6)
    return low - margin, high + margin


def is_wide(values: Floats) -> bool:
    """Whether values are positive and span so much that their axis is logarithmic."""
    return len(values) > 0 and bool(values.min() > 0 and values.max() >= _WIDE_SPAN * values.min())


def plot(
    curves: Iterable[Curve],
    ends: tuple[float, float],
    marks: Sequence[float] = (),
    bands: Sequence[tuple[float, float]] = (),
    log: bool = False,
    level: tuple[str, float] | None = None,
) -> str:
    """Curves as an inline SVG with numbers at both axes.

    Args:
        curves: those without a point are left out.
        ends: lowest and highest value to show.
        marks: amounts at which a vertical line stands.
        bands: first and last amounts at which a value is not finite.
        log: whether the axis of values is logarithmic.
        level: name and value of a horizontal line.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return "<svg></svg>"
    scale = math.log10 if log else float
    low, high = map(scale, ends)
    begin = min([float(curve.x[0]) for curve in curves] + [first for first, _ in bands] + list(marks))
    end = max([float(curve.x[-1]) for curve in curves] + [last for _, last in bands])
    wide, tall = _WIDTH - _LEFT, _HEIGHT - _BELOW

    def x_of(value: float) -> float:
        return _LEFT + _INSET + (value - begin) / ((end - begin) or 1.0) * (wide - _INSET - _RIGHT)

    def y_of(value: float) -> float:
        return tall - (min(scale(value), high + (high - low)) - low) / (high - low) * tall

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    parts.append(f'<rect class="frame" x="{_LEFT}" width="{wide}" height="{tall}"/>')
    powers = (10.0**tick for tick in ticks(low, high) if tick == round(tick))
    for value in powers if log else ticks(low, high):
        y, shown = y_of(value), f"{value:.5g}"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for tick in ticks(begin, end):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{tall + 18}" text-anchor="middle">{human(tick)}</text>')
    # what is above the frame is cut off by this inner one
    parts.append(f'<svg x="{_LEFT}" width="{wide}" height="{tall}" viewBox="{_LEFT} 0 {wide} {tall}">')
    for first, last in bands:
        wide_of = max(x_of(last) - x_of(first), 2.0)
        parts.append(f'<rect class="bad" x="{x_of(first):.1f}" width="{wide_of:.1f}" height="{tall}">{_BAD}</rect>')
    for mark in (x_of(mark) for mark in marks if mark <= end):
        parts.append(f'<line class="mark" x1="{mark:.1f}" x2="{mark:.1f}" y1="0" y2="{tall}"/>')
    for curve in curves:
        points = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True)]
        name, color = html_text(f"{curve.label}: {curve.y[-1]:.4g} at the end"), color_class(curve.group)
        parts.append(f'<polyline class="{color}" points="{" ".join(points)}"><title>{name}</title></polyline>')
        if len(points) <= _FEW_POINTS:
            parts.append(f'<path class="{color}" d="{" ".join(f"M{point}h0" for point in points)}"/>')
    if level is not None:
        y = y_of(level[1])
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{y - 5:.1f}" text-anchor="end">{level[0]}</text>')
    return "".join([*parts, "</svg></svg>"])


def figure(drawn: str, caption: str) -> str:
    """A plot with its caption."""
    return f"<figure><figcaption>{html_text(caption)}</figcaption>{drawn}</figure>"


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


def color_class(group: int) -> str:
    """The class of a group's color; after all colors they come again, dashed."""
    return f"g{group % _COLORS}" + (" dashed" if group // _COLORS % 2 else "")


def page(title: str, parts: Iterable[str]) -> str:
    """The page, of parts that are HTML."""
    return _PAGE.format(title=html_text(title), parts="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1f2328; --faint: #d1d9e0; --paper: #ffffff; --red: #cf222e; }}
.g0, .note {{ --tone: #0969da; }} .g1 {{ --tone: #bc4c00; }} .g2 {{ --tone: #1a7f37; }} .g3 {{ --tone: #bf3989; }}
.g4 {{ --tone: #8250df; }} .g5, .warning {{ --tone: #9a6700; }} .error {{ --tone: var(--red); }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --faint: #3d444d; --paper: #0d1117; --red: #ff7b72; }}
  .g0, .note {{ --tone: #58a6ff; }} .g1 {{ --tone: #f0883e; }} .g2 {{ --tone: #3fb950; }} .g3 {{ --tone: #f778ba; }}
  .g4 {{ --tone: #bc8cff; }} .g5, .warning {{ --tone: #d29922; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); overflow-wrap: anywhere; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1.1rem; }} .verdict, dt {{ font-weight: 600; }}
b {{ color: var(--tone); }} section {{ border-left: 4px solid var(--tone); padding-left: .8rem; margin: 1.5rem 0; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; margin: .8rem 0; }}
th, td {{ text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--faint);
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th:first-child, .left {{ text-align: left; }} thead th {{ font-weight: 600; }} tbody th {{ font-weight: 400; }}
dl {{ display: grid; grid-template-columns: minmax(auto, 11rem) 1fr; gap: .3rem .8rem; }} dd {{ margin: 0; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; }} figcaption {{ font-size: 13px; }} svg {{ width: 100%; height: auto; overflow: visible; }}
svg svg {{ overflow: hidden; }} line {{ stroke: var(--faint); }} .mark {{ stroke: var(--red); stroke-dasharray: 3 3; }}
polyline {{ fill: none; stroke: var(--tone); stroke-width: 1.5; vector-effect: non-scaling-stroke; }}
path {{ stroke: var(--tone); stroke-width: 6; stroke-linecap: round; }} .dashed {{ stroke-dasharray: 5 3; }}
.frame {{ fill: none; stroke: var(--faint); }}
text {{ font-size: 11px; fill: currentColor; }}
@media (max-width: 600px) {{ text {{ font-size: 16px; }} dl {{ display: block; }}
  thead th:not(:first-child), td:empty {{ display: none; }} tr > * {{ border: 0; white-space: normal; }}
  tr {{ display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--faint); }} th:first-child {{ flex-basis: 100%; }}
  td::before {{ content: attr(data-head) " "; opacity: .6; }} }}
.bad {{ fill: var(--red); opacity: .2; }} .legend span {{ margin-right: 1.2rem; white-space: nowrap; }}
i {{ background: var(--tone); display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  border-radius: 2px; vertical-align: -1px; }}
</style></head><body><h1>{title}</h1>
{parts}
</body></html>
"""
