"""Lightning strategies: where tensors live."""

from lightning_tricks.strategies.consolidate_deepspeed import consolidate_deepspeed
from lightning_tricks.strategies.deepspeed_zero_strategy import DeepSpeedZeROStrategy
from lightning_tricks.strategies.fsdp2.fsdp2_strategy import FSDP2Strategy

__all__ = ["DeepSpeedZeROStrategy", "FSDP2Strategy", "consolidate_deepspeed"]
