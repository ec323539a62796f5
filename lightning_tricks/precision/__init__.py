"""Lightning precision plugins."""

from lightning_tricks.precision.auto_precision import AutoPrecision, has_fast_bf16

__all__ = ["AutoPrecision", "has_fast_bf16"]
