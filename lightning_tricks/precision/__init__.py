"""Lightning precision plugins."""

from lightning_tricks.precision.auto_precision import AutoPrecision, has_fast_bf16
from lightning_tricks.precision.bf16_mixed import BF16Mixed

__all__ = ["AutoPrecision", "BF16Mixed", "has_fast_bf16"]
