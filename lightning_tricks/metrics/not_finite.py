"""The warning that a loss is NaN or infinite, for runs without StepGuard."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_tricks.metrics.row import Row


def not_finite_line(rows: Sequence[Row], logged: Mapping[str, Any]) -> str | None:
    """The warning about the first loss that is not finite; None if all are finite, or if StepGuard checks the steps.

    Args:
        rows: an interval's steps, read already.
        logged: latest values by name, such as `trainer.callback_metrics`, for losses that a module logs by itself.
    """
    if not rows or any(name.startswith("_step_guard/") for row in rows for name in row.values):
        return None
    known = [(row.step, name, value) for row in rows for name, value in row.values.items()]
    own = {name for _, name, _ in known}
    others = {name: value for name, value in logged.items() if name not in own and _is_loss(name)}
    known += [(rows[-1].step, name, float(value)) for name, value in others.items()]
    for step, name, value in known:
        if _is_loss(name) and not math.isfinite(value):
            return (
                f"{name} is {value} at step {step}: if the weights are not finite any more, what follows is lost. "
                "Stop, go on from an earlier checkpoint, and add the callback StepGuard, which skips such a step"
            )
    return None


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and not name.startswith("_")
