"""A plan in a terminal: the learning rate as a curve, drawn by uniplot, and a table of the phases."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks.logs.table import LEAST_WIDTH, MOST_CURVES, TO_ASCII, draw_curves, human, lines_of, unit

if TYPE_CHECKING:  # it imports torch
    from lightning_tricks.commands.schedule.plan import Phase, SchedulePlan

Axis = Literal["steps", "tokens"]
_LABELS = 12  # columns right of the plot, for the frame and the numbers of the y axis
_LEAST_HEIGHT, _MOST_HEIGHT = 6, 24
_NAMES = 2  # of groups in a label; the others are counted


class NamedPlan(NamedTuple):
    """A plan with the name of its recipe."""

    name: str
    plan: "SchedulePlan"


class Line(NamedTuple):
    """One line of a picture.

    Args:
        label: groups that it stands for.
        x: steps, or tokens seen before them.
        y: values.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def lr_lines(plans: Sequence[NamedPlan], axis: Axis) -> list[Line]:
    """The learning rates: a line for all groups of a plan that have the same one."""
    lines = []
    for named in plans:
        same: dict[tuple[float, ...], tuple[list[str], float]] = {}
        for group in named.plan.groups:
            same.setdefault(group.lr, ([], group.lr_scale))[0].append(group.name)
        for lr, (names, scale) in same.items():
            label = ", ".join(names[:_NAMES]) + (f" +{len(names) - _NAMES}" if len(names) > _NAMES else "")
            label = label if len(plans) == 1 else f"{named.name}: {label}"
            scaled = f" (lr x {scale:.4g})" if scale != 1 else ""
            lines.append(Line(label + scaled, positions(named.plan, axis), lr))
    return lines


def positions(plan: "SchedulePlan", axis: Axis) -> tuple[float, ...]:
    """The place of each of a plan's `steps` on the axis."""
    if axis == "steps":
        return tuple(map(float, plan.steps))
    if plan.tokens is None:
        raise UsageError("schedule: x=tokens: the data module does not tell its tokens: give x=steps")
    return tuple(map(float, plan.tokens))


def place_of(plan: "SchedulePlan", step: int, axis: Axis) -> float:
    """The place of any step, between those that the plan has."""
    end = plan.total_steps if axis == "steps" else plan.total_tokens or 0
    return float(np.interp(step, (*plan.steps, plan.total_steps), (*positions(plan, axis), end)))


def draw_in_terminal(
    plans: Sequence[NamedPlan],
    *,
    axis: Axis = "steps",
    columns: int = 80,
    lines: int = 24,
    unicode: bool = True,
    color: bool = False,
) -> str:
    """The curves of the first plan and of those laid over it, the marks of the first, and a table of its phases.

    Args:
        plans: the first one has the marks and the table.
        axis: what the curves are drawn over.
        columns: width of the terminal.
        lines: its height; the plot has what the rest leaves, and at least 6.
        unicode: whether it shows more than ASCII.
        color: whether it shows colors.

    Raises:
        UsageError: uniplot is not installed.
    """
    plan = plans[0].plan
    curves = lr_lines(plans, axis)
    more, curves = len(curves) - MOST_CURVES, curves[:MOST_CURVES]
    end, highest = max(max(line.x) for line in curves), max(max(line.y) for line in curves)
    top = 1.02 * highest or 1.0
    size, letter = unit(end) if axis == "tokens" else (1.0, "")
    width = max(columns - _LABELS, LEAST_WIDTH)
    marks = [(place_of(plan, phase.step, axis), phase.name) for phase in plan.phases[:-1]]
    tokens = "" if plan.total_tokens is None else f", {human(plan.total_tokens)} tokens"
    head = [f"lr over {axis} of {plans[0].name}: {plan.total_steps:,} steps{tokens}", *marks_row(marks, end, width)]

    def drawn(height: int) -> list[str]:
        rows = draw_curves(
            [
                (label, [value / size for value in line.x], line.y)
                for label, line in zip(_unique(curves), curves, strict=True)
            ],
            width=width,
            height=height,
            x_min=0.0,
            x_max=end / size,
            x_unit=letter,
            y_min=0.0,
            y_max=top,
            x_gridlines=[place / size for place, _ in marks if place > 0],
            character_set="braille" if unicode and (color or len(curves) == 1) else "ascii",
            color=color,
        )
        first = next(number for number, row in enumerate(rows) if "┌" in row) + 1
        labels = {first + height - 1 - int(part / 4 * highest / top * height): part / 4 * highest for part in range(5)}
        for number in range(first, first + height):  # uniplot rounds 0.0075 to 0.008
            label = f" {labels[number]:.3g}" if number in labels else ""
            rows[number] = rows[number].rpartition("│")[0] + "│" + label
        return [*head, *rows, *_below(plans, more)]

    rows = drawn(_MOST_HEIGHT)
    if (over := len(rows) + 1 - lines) > 0:  # the last line is that of the prompt
        rows = drawn(max(_MOST_HEIGHT - over, _LEAST_HEIGHT))
    return "\n".join(rows if unicode else [row.translate(TO_ASCII) for row in rows])


def marks_row(marks: Sequence[tuple[float, str]], end: float, width: int) -> list[str]:
    """One line with the name of each mark over its place; a second one for names that would overlap; then none.

    Example:
        >>> marks_row([(10.0, "stable"), (80.0, "decay")], end=100.0, width=20)
        ['   stable       decay']
    """
    rows = ["", ""]
    for place, name in sorted(marks):
        behind_frame = 1 + (min(int(place / end * width), width - 1) if end else 0)
        column = min(behind_frame, max(width + 1 - len(name), 1))
        for number, row in enumerate(rows):
            if len(row) < column or not row:
                rows[number] = row.ljust(column) + name
                break
    return [row for row in rows if row]


def _unique(curves: Sequence[Line]) -> list[str]:
    """The labels, each once: uniplot joins series of one name."""
    seen: dict[str, int] = {}
    labels = []
    for line in curves:
        seen[line.label] = seen.get(line.label, 0) + 1
        labels.append(line.label if seen[line.label] == 1 else f"{line.label} ({seen[line.label]})")
    return labels


def _below(plans: Sequence[NamedPlan], more_curves: int) -> list[str]:
    plan = plans[0].plan
    heads = ("phase", "step", "tokens so far", "lr", "batch", "weight decay")
    rows = lines_of([heads, *map(_row, plan.phases)], style=lambda row, column: None if row else "bold")
    if more_curves > 0:
        rows.insert(0, f"{more_curves} more curves are not drawn")
    for other in plans[1:]:
        tokens = other.plan.total_tokens
        seen = "" if tokens is None else f", {human(tokens)} tokens"
        rows.append(f"{other.name}: {other.plan.total_steps:,} steps{seen}, peak lr {other.plan.peak:.4g}")
    kinds = (("validation", plan.validations), ("checkpoint", plan.checkpoints), ("kept for ever", plan.permanent))
    marks = [_times(name, steps) for name, steps in kinds if steps]
    return [row for row in [*rows, "; ".join(marks), *plan.notes] if row]


def _times(name: str, steps: Sequence[int]) -> str:
    """`validation after every 200 steps (2)`; with uneven distances, the first and the last."""
    even = all(b - a == steps[0] for a, b in pairwise(steps))
    after = f"every {steps[0]:,} steps" if even else f"steps {steps[0]:,} to {steps[-1]:,}"
    return f"{name} after {after} ({len(steps):,})"


def _row(phase: "Phase") -> tuple[str, ...]:
    if phase.batch_tokens is not None:
        batch = f"{phase.rows:,} rows, {human(phase.batch_tokens)} tokens"
    else:
        batch = f"{phase.rows:,} rows" if phase.rows is not None else "-"
    tokens = "-" if phase.tokens is None else human(phase.tokens)
    return (phase.name, f"{phase.step:,}", tokens, f"{phase.lr:.4g}", batch, f"{phase.weight_decay:.4g}")
