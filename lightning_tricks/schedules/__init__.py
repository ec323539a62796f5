"""Learning-rate curves: pure functions of the step, and the torch scheduler that runs one."""

from lightning_tricks.schedules.curves import (
    CosineRestarts,
    PowerDecay,
    Schedule,
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)
from lightning_tricks.schedules.schedule_lr import PlannedGroup, ScheduleLR, chosen_steps, planned_groups

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
