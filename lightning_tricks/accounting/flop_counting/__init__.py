"""The FLOPs of a training step of any module, counted on a copy without data or while the real step runs."""

from lightning_tricks.accounting.flop_counting.count_step import count_flops, count_on_copy, counting_real_step
from lightning_tricks.accounting.flop_counting.flop_counter import CannotCount, FlopCounter

__all__ = ["CannotCount", "FlopCounter", "count_flops", "count_on_copy", "counting_real_step"]
