"""What a decay off a run should end at, on one line, from the logs of the run and of its branches. Loads no torch."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tricks.logs.decay_forecast import LEAST_POINTS, LossCurve, decay_forecast
from lightning_tricks.logs.run import entry_at, settings_of
from lightning_tricks.logs.scalars import ROLES, Scalars, read_scalars

_NAMES = frozenset(name for role in ("val_loss", "loss", "lr") for name in ROLES[role])


def line_of_branch(folder: Path, start: int, decay: Sequence[float], lr: float | None = None) -> str | None:
    """What a decay off a run would end at, on one line; None where the run has logged too little to ask.

    Args:
        folder: of the run; decays off it that were logged beside it are read too.
        start: optimizer steps done where the decay starts.
        decay: learning rates of its steps, over the one from which it starts.
        lr: of its recipe; None where the recipe does not say.
    """
    log = read_scalars(folder, _NAMES)
    metric = next((role for role in ("val_loss", "loss") if len(_values(log, role, start)) >= LEAST_POINTS), None)
    lrs = _values(log, "lr", start)
    if metric is None or not any(lrs.values()):
        return None
    end = f"{'validation' if metric == 'val_loss' else 'training'} loss at the end of this decay"
    own = lr_of(settings_of(folder)[0])
    if lr and own and lr != own:
        return f"No forecast of the {end}: its learning rate is {lr:g}, that of the run before it {own:g}"
    run, whole = _curve(log, log, metric, start), _curve(log, log, metric, math.inf)
    logs = ((read_scalars(branch, _NAMES), step) for branch, step in _branches(folder, own))
    decays = [(branch, step) for branch, step in logs if _values(branch, metric) and _values(branch, "lr")]
    others = [whole, *(_curve(log, branch, metric, step) for branch, step in decays)]
    now = lrs[max(lrs)]  # lower than before where the run went on with another
    found = decay_forecast(run, now * np.asarray(decay), [each for each in others if each.lrs[-1] < now])
    if found.refusal:
        return f"No forecast of the {end}: {found.refusal}"
    return (
        f"Forecast: {found.loss:.3f} ({found.low:.3f} to {found.high:.3f}) is the {end}, lower by {found.gain:.3f}, by "
        "the multi-power law"
    )


def _branches(folder: Path, lr: float | None) -> Iterator[tuple[Path, int]]:
    """The folders of decays off a run, beside it, each with its first step; none of another learning rate."""
    for branch in sorted(each.parent for each in folder.parent.glob("*/config.yaml")):  # none in a closed folder
        document = settings_of(branch)[0]
        callbacks = entry_at(document, "trainer", "callbacks")
        for callback in callbacks if isinstance(callbacks, list) and lr in (None, lr_of(document)) else []:
            trunk, step = (entry_at(callback, "init_args", name) for name in ("trunk", "trunk_step"))
            is_origin = str(entry_at(callback, "class_path")).endswith("BranchLineage")
            if is_origin and isinstance(step, int) and Path(str(trunk)).parent.parent in (folder, folder.resolve()):
                yield branch, step


def lr_of(document: Any) -> float | None:
    """The learning rate that a recipe gives its optimizer; None where it does not say."""
    lr = entry_at(document, "model", "init_args", "optimizer", "init_args", "lr")
    return lr if isinstance(lr, float) else None


def _values(log: Scalars, role: str, end: float = math.inf) -> dict[int, float]:
    """The positive values of a role, by optimizer steps done, up to `end` of them; of a learning rate 0 too."""
    series = next((found for name in ROLES[role] if (found := log.series(name))), {})
    return {
        step + 1: value
        for step, value in series.items()
        if step < end and 0 <= value < math.inf and (value or role == "lr")
    }


def _curve(trunk: Scalars, branch: Scalars, role: str, start: float) -> LossCurve:
    """The log of a run up to a step, and of its branch from there on; of the run alone if both are one."""
    more = {each: {} if trunk is branch else _values(branch, each) for each in (role, "lr")}
    losses, lrs = ({**_values(trunk, each, start), **more[each]} for each in (role, "lr"))
    steps, known = np.array(sorted(losses), np.float64), sorted(lrs)
    return LossCurve(
        steps, np.array([losses[int(step)] for step in steps]), np.interp(steps, known, [lrs[step] for step in known])
    )
