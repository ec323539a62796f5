"""Log how much memory the run takes, on the device and on the host."""

import re
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import is_accumulating
from lightning_tricks.metrics.metric_buffer import MetricBuffer

__all__ = ["MemoryMonitor"]

GIB = 2**30
_STATUS = Path("/proc/self/status")


def device_memory(device: torch.device) -> dict[str, float]:
    """The counters of torch's allocator for a CUDA device; resets the peak. Does not wait for the device.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/allocated_gib": stats.get("allocated_bytes.all.current", 0) / GIB,
        "memory/reserved_gib": stats.get("reserved_bytes.all.current", 0) / GIB,
        "memory/peak_allocated_gib": stats.get("allocated_bytes.all.peak", 0) / GIB,
        "memory/allocation_retries": stats.get("num_alloc_retries", 0),
    }


def process_memory() -> dict[str, float]:
    """Resident memory of this process, now and at its peak, in GiB; only the figures that the system has."""
    if _STATUS.exists():
        sizes = dict(re.findall(rb"(VmRSS|VmHWM):\s*(\d+)", _STATUS.read_bytes()))
        found = {"memory/rss_gib": sizes.get(b"VmRSS"), "memory/peak_rss_gib": sizes.get(b"VmHWM")}
        return {name: int(kib) * 1024 / GIB for name, kib in found.items() if kib is not None}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


class MemoryMonitor(pl.Callback):
    """Record memory on each log step, the maximum over ranks. Never changes training.

    On CUDA: `memory/allocated_gib` and `memory/reserved_gib` at the end of the step, `memory/peak_allocated_gib` since
    the last log step (the first time: since the program started). `memory/allocation_retries` is how often since the
    program started the allocator had to free its cached memory and ask again: a count that grows means that memory is
    nearly full, and each retry stops the device. The allocator keeps these counters on the host. Reading the peak
    resets it, so elsewhere in the program `torch.cuda.max_memory_allocated()` too is the peak since the last log step.

    On other devices: `memory/rss_gib` and `memory/peak_rss_gib`, the memory of the training process without its data
    workers; on macOS the peak only.
    """

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer."""
        self._buffer = MetricBuffer.of(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the counters, on the last micro-batch of a log step."""
        if is_accumulating(trainer) or not self._buffer.is_log_step():
            return
        device = trainer.strategy.root_device
        found = device_memory(device) if device.type == "cuda" else process_memory()
        self._buffer.record_all(tuple(found), torch.tensor(list(found.values()), dtype=torch.float64), "max")
