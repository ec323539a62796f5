"""Learning-rate curves: pure functions of the step, and the torch scheduler that runs one."""

from lightning_tricks.schedules.cosine_restarts import CosineRestarts
from lightning_tricks.schedules.power_decay import PowerDecay
from lightning_tricks.schedules.schedule import Schedule
from lightning_tricks.schedules.schedule_lr import ScheduleLR
from lightning_tricks.schedules.warmup_constant import WarmupConstant
from lightning_tricks.schedules.warmup_cosine import WarmupCosine
from lightning_tricks.schedules.warmup_inverse_sqrt import WarmupInverseSqrt
from lightning_tricks.schedules.warmup_linear import WarmupLinear
from lightning_tricks.schedules.warmup_stable_decay import WarmupStableDecay

__all__ = [
    "CosineRestarts",
    "PowerDecay",
    "Schedule",
    "ScheduleLR",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupStableDecay",
]
