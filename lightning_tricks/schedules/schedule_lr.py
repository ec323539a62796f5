"""Drive any torch optimizer with a `Schedule`: a torch scheduler whose only state is the step.

`planned_groups` tells the learning rate and weight decay of each group at any step, for the command `schedule` and for
the dashboard.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.schedules.curves import Schedule

__all__ = ["ScheduleLR"]


class ScheduleLR(LRScheduler):
    """Set the learning rate of each group to the schedule's value for that group's own learning rate.

    The state dict holds `last_epoch` (torch's word for the step) and nothing else, so a resume with another learning
    rate, length or shape follows the recipe and not the checkpoint. The optimizer's state, which holds the old `lr` and
    `initial_lr` of each group, may be loaded before or after the scheduler's: both are set again. The state of any
    other torch scheduler can be loaded too, because all of them keep `last_epoch`.

    Call `step()` once after each optimizer step. A learning rate held in a Tensor is filled in place.

    Args:
        optimizer: any torch optimizer; each group's `lr` at this moment is its peak.
        schedule: the curve.
        total_steps: optimizer steps in the whole run (`trainer.max_steps`); None where the schedule needs no length.
        group_schedules: for each group, a curve of its own in place of `schedule`, or None. Empty: None for all groups.
        decay_schedules: for each group, a curve of its weight decay, whose peak is the group's decay at this moment, or
            None for a constant decay. Empty: None for all groups.
        length_follows: the length is not known yet; `set_total_steps` must be called before the first step. Until then,
            each group has its peak.

    Raises:
        UsageError: the run does not fit a schedule (`Schedule.check`).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=1.0)
        >>> from lightning_tricks.schedules import WarmupLinear
        >>> scheduler = ScheduleLR(optimizer, WarmupLinear(warmup_steps=2), total_steps=4)
        >>> for step in range(4):
        ...     print(step, optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     scheduler.step()
        0 0.5
        1 1.0
        2 1.0
        3 0.5
        >>> scheduler.state_dict()
        {'last_epoch': 4}
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        total_steps: int | None = None,
        group_schedules: Sequence[Schedule | None] = (),
        decay_schedules: Sequence[Schedule | None] = (),
        length_follows: bool = False,
    ) -> None:
        self.schedule, self.total_steps, self.length_follows = schedule, total_steps, length_follows
        none = [None] * len(optimizer.param_groups)
        self._group_schedules, self._decay_schedules = group_schedules or none, decay_schedules or none
        if not length_follows:
            self._check(total_steps)
        self._decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        self._factors: list[Callable[[int], float]] = []
        # read once: float() of a learning rate on a GPU waits for the GPU
        self._peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        super().__init__(optimizer)
        self.has_loaded = False  # whether a state dict has set the step
        self.loaded_lr: float | None = None  # of the first group, in the optimizer's state that was loaded last
        # before any hook that puts the recipe's settings into the state
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._note_lr(state), prepend=True)
        optimizer.register_load_state_dict_post_hook(lambda _: self.refresh())

    def _note_lr(self, state: dict[str, Any]) -> None:
        groups = state.get("param_groups") or [{}]
        self.loaded_lr = float(groups[0]["lr"]) if "lr" in groups[0] else None

    @property
    def curves(self) -> list[Schedule]:
        """All curves: the schedule, and the curves of single groups for learning rate and decay."""
        return [curve for curve in (self.schedule, *self._group_schedules, *self._decay_schedules) if curve is not None]

    @property
    def group_curves(self) -> list[Schedule]:
        """The curve of each group's learning rate."""
        return [own or self.schedule for own in self._group_schedules]

    def _check(self, total_steps: int | None) -> None:
        for curve in self.curves:
            curve.check(total_steps)

    def set_total_steps(self, total_steps: int | None) -> None:
        """Set the length of the run, and the learning rates and decays of the current step.

        Raises:
            UsageError: the run does not fit a schedule; then everything stays as it was.
        """
        self._check(total_steps)
        self.total_steps, self.length_follows = total_steps, False
        self.refresh()

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at the current step."""
        return [*self.lrs_at(self.last_epoch)]

    def lrs_at(self, step: int) -> list[float]:
        """The learning rate of each group at any step, whatever the current one is."""
        if self.length_follows:
            return [*self._peaks]
        factor, curves = self.factor(step), zip(self.group_curves, self._peaks, strict=True)
        return [curve.lr(peak, step, self.total_steps) * factor for curve, peak in curves]

    def decays_at(self, step: int) -> list[float]:
        """The weight decay of each group at any step; those without a curve keep what they have."""
        groups = zip(self._decay_schedules, self._decays, strict=True)
        constant = self.length_follows
        return [peak if curve is None or constant else curve.lr(peak, step, self.total_steps) for curve, peak in groups]

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step: set learning rates, and decays that have a schedule."""
        super().step(epoch)
        self._set_decays()

    def _set_decays(self) -> None:
        if not any(self._decay_schedules) or self.length_follows:
            return
        decays = self.decays_at(self.last_epoch)
        for group, curve, decay in zip(self.optimizer.param_groups, self._decay_schedules, decays, strict=True):
            if curve is not None:
                group["weight_decay"] = decay

    def scale_by(self, factor: Callable[[int], float]) -> None:
        """Multiply the schedule's value for each group by `factor(step)`, from the current step on.

        It belongs to the recipe like the schedule, so no state dict holds it. Factors of several calls multiply.
        """
        self._factors.append(factor)
        self.refresh()

    def factor(self, step: int) -> float:
        """The product of the factors of `scale_by` at `step`; 1.0 without any."""
        return math.prod((factor(step) for factor in self._factors), start=1.0)

    def state_dict(self) -> dict[str, Any]:
        """The step, without any setting of the recipe."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step from `state_dict` and set the recipe's learning rates for it."""
        self.last_epoch, self.has_loaded = state_dict["last_epoch"], True
        self.refresh()

    def refresh(self) -> None:
        """Set the learning rates and decays of the current step anew, such as after a factor has changed."""
        last: list[float | Tensor] = []
        for group, base, lr in zip(self.optimizer.param_groups, self.base_lrs, self.get_lr(), strict=True):
            group["initial_lr"] = base.clone() if isinstance(base, Tensor) else base
            if not isinstance(base, Tensor):
                group["lr"] = lr
            elif isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # in place: a compiled optimizer step has captured this tensor
            else:
                group["lr"] = torch.full_like(base, float(lr))
            last.append(group["lr"].clone() if isinstance(group["lr"], Tensor) else lr)
        self._last_lr = last
        self._set_decays()


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
