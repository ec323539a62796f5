"""The start of a decay that ends with the run: the three options for it, their checks, and the step that follows."""

from typing import Any

from lightning_tricks._errors import UsageError
from lightning_tricks.schedules.schedule import check_share, check_whole


def check_decay_options(schedule: Any) -> None:
    """Refuse more than one of `decay_steps`, `decay_fraction` and `decay_start`, and one that is out of range."""
    name = type(schedule).__name__
    given = [o for o in ("decay_steps", "decay_fraction", "decay_start") if getattr(schedule, o) is not None]
    if len(given) > 1:
        raise UsageError(f"{name}: {' and '.join(given)} are both given: keep one of them")
    for option in given:
        if option == "decay_fraction":
            check_share(schedule, option)
        else:
            check_whole(schedule, option, least=1 if option == "decay_steps" else 0)


def decay_start(schedule: Any, total_steps: int, default_fraction: float) -> int:
    """The step at which the decay starts.

    Args:
        schedule: with the three options, of which at most one is given.
        total_steps: optimizer steps in the whole run.
        default_fraction: share of the run that decays if none of the three is given.
    """
    if schedule.decay_start is not None:
        return int(schedule.decay_start)
    if schedule.decay_steps is not None:
        return int(total_steps - schedule.decay_steps)
    fraction = default_fraction if schedule.decay_fraction is None else schedule.decay_fraction
    return total_steps - round(fraction * total_steps)


def check_decay_fits(schedule: Any, total_steps: int, start: int) -> None:
    """Refuse a decay that starts in the warmup or never."""
    name = type(schedule).__name__
    if start < schedule.warmup_steps:
        raise UsageError(
            f"{name}: the decay starts at step {start}, before warmup_steps={schedule.warmup_steps} is over "
            f"(trainer.max_steps={total_steps}): shorten the warmup or the decay"
        )
    if start >= total_steps:
        raise UsageError(
            f"{name}: the decay starts at step {start}, not before trainer.max_steps={total_steps}: "
            "let it start earlier or lengthen the run"
        )
