"""The lines of a drawn plan: which groups share one, and their names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_tricks._core.errors import UsageError

if TYPE_CHECKING:  # it imports torch, which `compare` does without
    from lightning_tricks.commands.schedule.plan import Plan

Axis = Literal["steps", "tokens"]
_NAMES = 2  # of groups in a label; the others are counted


@dataclass(frozen=True)
class NamedPlan:
    """A plan with the name of its recipe."""

    name: str
    plan: "Plan"


@dataclass(frozen=True)
class Line:
    """One line of a picture.

    Args:
        label: groups that it stands for.
        x: steps, or tokens seen before them.
        y: values.
        recipe: number of the recipe, from 0; -1 for the constant baseline.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    recipe: int


def lr_lines(plans: Sequence[NamedPlan], axis: Axis, constant: bool) -> list[Line]:
    """The learning rates: a line for all groups of a plan that have the same one; then the baseline at the peak."""
    lines = []
    for number, named in enumerate(plans):
        groups = named.plan.groups
        x = positions(named.plan, axis)
        for names, lr, scale in _joined((group.name, group.lr, group.lr_scale) for group in groups):
            scaled = f" (lr x {scale:.4g})" if scale != 1 else ""
            lines.append(Line(_of(named.name, plans, names) + scaled, x, lr, number))
    if constant:
        first = plans[0].plan
        x = positions(first, axis)
        lines.append(Line(f"constant {first.peak:.4g}", x, (first.peak,) * len(x), -1))
    return lines


def positions(plan: "Plan", axis: Axis) -> tuple[float, ...]:
    """The place of each of a plan's `steps` on the axis."""
    if axis == "steps":
        return tuple(map(float, plan.steps))
    if plan.tokens is None:
        raise UsageError("schedule: x=tokens: the data module does not tell its tokens: give x=steps")
    return tuple(map(float, plan.tokens))


def place_of(plan: "Plan", step: int, axis: Axis) -> float:
    """The place of any step, between those that the plan has."""
    places = positions(plan, axis)
    if step <= plan.steps[0]:
        return places[0]
    for before, after, low, high in zip(plan.steps, plan.steps[1:], places, places[1:], strict=False):
        if step <= after:
            return low + (high - low) * (step - before) / (after - before)
    last = float(plan.total_steps if axis == "steps" else plan.total_tokens or 0)
    return last if step > plan.steps[-1] else places[-1]


def _joined(
    groups: Iterable[tuple[str, tuple[float, ...], float]],
) -> list[tuple[list[str], tuple[float, ...], float]]:
    """Names, values and scale of groups that have the same values."""
    found: dict[tuple[float, ...], tuple[list[str], float]] = {}
    for name, values, scale in groups:
        found.setdefault(values, ([], scale))[0].append(name)
    return [(names, values, scale) for values, (names, scale) in found.items()]


def _of(recipe: str, plans: Sequence[NamedPlan], names: list[str]) -> str:
    more = f" +{len(names) - _NAMES}" if len(names) > _NAMES else ""
    groups = ", ".join(names[:_NAMES]) + more
    return groups if len(plans) == 1 else f"{recipe}: {groups}"
