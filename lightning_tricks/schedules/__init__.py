"""Learning-rate curves: pure functions of the step, and the torch scheduler that runs one."""

from lightning_tricks.schedules.curves import CosineRestarts as CosineRestarts
from lightning_tricks.schedules.curves import PowerDecay as PowerDecay
from lightning_tricks.schedules.curves import Schedule as Schedule
from lightning_tricks.schedules.curves import WarmupConstant as WarmupConstant
from lightning_tricks.schedules.curves import WarmupCosine as WarmupCosine
from lightning_tricks.schedules.curves import WarmupInverseSqrt as WarmupInverseSqrt
from lightning_tricks.schedules.curves import WarmupLinear as WarmupLinear
from lightning_tricks.schedules.curves import WarmupStableDecay as WarmupStableDecay
from lightning_tricks.schedules.schedule_lr import PlannedGroup as PlannedGroup
from lightning_tricks.schedules.schedule_lr import ScheduleLR as ScheduleLR
from lightning_tricks.schedules.schedule_lr import chosen_steps as chosen_steps
from lightning_tricks.schedules.schedule_lr import planned_groups as planned_groups
