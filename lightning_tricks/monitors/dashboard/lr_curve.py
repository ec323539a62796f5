"""Compute the learning rates of a whole run before it trains, and draw them without a plotting library."""

import copy
import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_tricks.schedules import ScheduleLR

LONGEST_WALK = 200_000  # steps of a copied scheduler; a second or two
PAPER, INK, GRID, CURVE = (255, 255, 255), (60, 60, 60), (225, 225, 225), (0, 110, 190)


def planned_lrs(scheduler: Any, steps: int, points: int = 600) -> list[tuple[int, float]]:
    """(step, lr) of the first parameter group at up to `points` of the run's steps; empty where it cannot be known.

    Args:
        scheduler: a `ScheduleLR`, which computes any step, or one of torch's, of which a copy is stepped to the end. A
            scheduler that waits for a metric cannot be known; one of another package is not copied, as it might hold
            the model.
        steps: how often the scheduler is stepped in the whole run.
        points: the most points to return.
    """
    if steps < 2:
        return []
    scale = scheduler.optimizer.param_groups[0].get("lr_scale") or 1.0
    chosen = sorted({round(i * (steps - 1) / (points - 1)) for i in range(points)})
    if isinstance(scheduler, ScheduleLR):
        peak = scheduler._peaks[0] / scale
        lr, total = scheduler.schedule.lr, scheduler.total_steps
        return [(step, lr(peak, step, total) * scheduler.factor(step)) for step in chosen]
    if not _may_walk(scheduler) or steps > LONGEST_WALK:
        return []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # the copy may draw random numbers
        warnings.simplefilter("ignore")  # "step() before optimizer.step()"
        lrs = _walk(scheduler, steps)
    return [(step, lrs[step] / scale) for step in chosen if step in lrs]


def _may_walk(scheduler: Any) -> bool:
    """Whether a copy is cheap and does not touch the run: one of torch's classes, whose functions hold no module."""
    functions = getattr(scheduler, "lr_lambdas", [])
    return (
        isinstance(scheduler, LRScheduler)
        and type(scheduler).__module__ == LRScheduler.__module__
        and not isinstance(scheduler, ReduceLROnPlateau)
        and all(isinstance(function, (types.FunctionType, functools.partial)) for function in functions)
    )


def _walk(scheduler: Any, steps: int) -> dict[int, float]:
    """Step a copy of the scheduler to the end, with a copied optimizer that has one element in each group."""
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    stand_in.param_groups = [
        {name: [torch.zeros(1)] if name == "params" else copy.deepcopy(value) for name, value in group.items()}
        for group in scheduler.optimizer.param_groups
    ]
    shared = {id(function): function for function in getattr(scheduler, "lr_lambdas", [])}
    walker = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in, **shared})
    lrs = {}
    for step in range(int(scheduler.last_epoch), steps):
        lrs[step] = float(stand_in.param_groups[0]["lr"])
        walker.step()
    return lrs


def draw_curve(points: Sequence[tuple[int, float]], title: str, width: int = 720, height: int = 320) -> np.ndarray:
    """A line through `points` above numbered axes, as RGB bytes of shape (height, width, 3)."""
    image = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = 80, 30, width - 20, height - 30
    first, last, highest = points[0][0], points[-1][0], max(value for _, value in points) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / max(last - first, 1)
        return left + across * (right - left), bottom - value / highest * (bottom - top)

    for quarter in range(5):
        x, _ = place(first + (last - first) * quarter / 4, 0)
        _, y = place(first, highest * quarter / 4)
        draw.line([(x, top), (x, bottom)], GRID)
        draw.line([(left, y), (right, y)], GRID)
        draw.text((x, bottom + 8), f"{first + (last - first) * quarter / 4:.0f}", INK, anchor="mt", font_size=12)
        draw.text((left - 8, y), f"{highest * quarter / 4:.3g}", INK, anchor="rm", font_size=12)
    draw.line([(left, top), (left, bottom), (right, bottom)], INK)
    draw.text((left, 8), title, INK, font_size=14)
    draw.line([place(*point) for point in points], CURVE, 2)
    return np.asarray(image)
