"""Lightning precision plugins."""

from lightning_tricks.accounting.device_speed import has_fast_bf16
from lightning_tricks.precision.auto_precision import AutoPrecision
from lightning_tricks.precision.bf16_mixed import BF16Mixed
from lightning_tricks.precision.bf16_true import BF16True
from lightning_tricks.precision.float8.float8 import Float8
from lightning_tricks.precision.fp16_mixed import FP16Mixed

__all__ = ["AutoPrecision", "BF16Mixed", "BF16True", "FP16Mixed", "Float8", "has_fast_bf16"]
