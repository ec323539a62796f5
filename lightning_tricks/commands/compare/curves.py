"""The curves of a comparison over an axis: each run's, or the mean of each group; and limits that show their ends."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_tricks.commands.compare.comparison import Comparison
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
    kept = np.isfinite(outcome.values)
    kept &= np.arange(len(outcome)) % math.ceil(len(outcome) / _MOST_POINTS) == 0
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
