"""The planned curves of a run: learning rate and weight decay of each parameter group, from the first step to the last.

The command `schedule` and the dashboard both take them from here, and `ScheduleLR` gives them, which also sets them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_tricks.schedules.schedule_lr import ScheduleLR


@dataclass(frozen=True)
class PlannedGroup:
    """The curves of one parameter group.

    Args:
        name: of the group; `group 0` and so on for groups without one.
        lr_scale: by which the group's learning rate differs from that of the recipe; 1.0 where nothing has set it.
        lr: learning rate at each of the steps asked for, as the optimizer has it.
        weight_decay: likewise.
    """

    name: str
    lr_scale: float
    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]

    @property
    def unscaled_lr(self) -> tuple[float, ...]:
        """The learning rates without the group's scale: those of the first group are what LRMonitor logs."""
        return tuple(lr / (self.lr_scale or 1.0) for lr in self.lr)


def planned_groups(scheduler: ScheduleLR, steps: Iterable[int]) -> tuple[PlannedGroup, ...]:
    """The learning rate and weight decay of each group of a scheduler's optimizer, at any steps of the run.

    Example:
        >>> import torch
        >>> from lightning_tricks.schedules import WarmupLinear
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1.0, weight_decay=0.1)
        >>> planned_groups(ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), total_steps=4), range(4))
        (PlannedGroup(name='group 0', lr_scale=1.0, lr=(0.5, 1.0, 1.0, 0.5), weight_decay=(0.1, 0.1, 0.1, 0.1)),)
    """
    chosen = tuple(steps)
    lrs, decays = ([at(step) for step in chosen] for at in (scheduler.lrs_at, scheduler.decays_at))
    return tuple(
        PlannedGroup(
            str(group.get("name", f"group {number}")),
            float(group.get("lr_scale") or 1.0),
            tuple(float(each[number]) for each in lrs),
            tuple(float(each[number]) for each in decays),
        )
        for number, group in enumerate(scheduler.optimizer.param_groups)
    )


def chosen_steps(total_steps: int, points: int = 600, also: Sequence[int] = ()) -> list[int]:
    """Up to `points` steps of a run, evenly spaced with the first and the last, and those of `also` that it has."""
    if total_steps < 1:
        return []
    even = {round(i * (total_steps - 1) / max(points - 1, 1)) for i in range(points)}
    return sorted(even.union(step for step in also if 0 <= step < total_steps))
