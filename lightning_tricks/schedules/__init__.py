"""Learning-rate curves: pure functions of the step, and the torch scheduler that runs one."""

from lightning_tricks.schedules.curves import (
    CosineRestarts,
    PowerDecay,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)
from lightning_tricks.schedules.planned_groups import PlannedGroup, chosen_steps, planned_groups
from lightning_tricks.schedules.schedule import Schedule
from lightning_tricks.schedules.schedule_lr import ScheduleLR

__all__ = [
    "CosineRestarts",
    "PlannedGroup",
    "PowerDecay",
    "Schedule",
    "ScheduleLR",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupStableDecay",
    "chosen_steps",
    "planned_groups",
]
