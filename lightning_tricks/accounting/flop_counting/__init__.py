"""The FLOPs of a training step of any module, counted while the step runs."""

from lightning_tricks.accounting.flop_counting.count_step import count_flops, counting_real_step
from lightning_tricks.accounting.flop_counting.flop_counter import CannotCount, FlopCounter

__all__ = ["CannotCount", "FlopCounter", "count_flops", "counting_real_step"]
