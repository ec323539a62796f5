"""Memory: the right counter under the right name, in GiB, on log steps only, the largest of the ranks."""

import sys
from pathlib import Path

import pytest
import torch
from harness import processes
from harness.models import Decoding
from harness.runs import decoding, fit

from lightning_tricks.callbacks import MemoryMonitor
from lightning_tricks.monitors import memory_monitor
from lightning_tricks.monitors.memory_monitor import GIB, device_memory, process_memory


@pytest.fixture
def allocator(monkeypatch):
    """torch's CUDA counters, in hand: 1 GiB now, 2 reserved, a peak of 8 until it is reset, 3 retries."""
    calls = []
    stats = {
        "allocated_bytes.all.current": GIB,
        "allocated_bytes.all.peak": 8 * GIB,
        "reserved_bytes.all.current": 2 * GIB,
        "reserved_bytes.all.peak": 16 * GIB,
        "num_alloc_retries": 3,
    }

    def reset(device):
        calls.append(device)
        stats["allocated_bytes.all.peak"] = 4 * GIB

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(stats))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    return calls


def test_reads_the_allocator_in_gib_and_starts_a_new_peak(allocator):
    device = torch.device("cuda", 1)
    found = device_memory(device)
    assert found == {
        "memory/allocated_gib": 1.0,
        "memory/reserved_gib": 2.0,
        "memory/peak_allocated_gib": 8.0,
        "memory/allocation_retries": 3,
    }
    assert allocator == [device]
    assert device_memory(device)["memory/peak_allocated_gib"] == 4.0


def test_on_cuda_each_log_step_has_the_peak_since_the_one_before(allocator, monkeypatch):
    class OnCuda(MemoryMonitor):
        def on_train_batch_end(self, trainer, *args):
            with monkeypatch.context() as patch:
                patch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
                super().on_train_batch_end(trainer, *args)

    run = decoding(OnCuda(), accumulate_grad_batches=2, max_steps=4)
    assert run.of("memory/peak_allocated_gib") == [8.0, 4.0]
    assert run.of("memory/allocation_retries") == [3.0, 3.0]
    assert [step for step, _ in run.rows] == [1, 3]
    assert len(allocator) == 2
    assert not any("rss" in name for name in run.names())


def test_the_process_is_as_large_as_the_kernel_says(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 9437184 kB\nVmHWM:\t 3145728 kB\nVmRSS:\t 1048576 kB\nThreads:\t4\n")
    monkeypatch.setattr(memory_monitor, "_STATUS", status)
    assert process_memory() == {"memory/rss_gib": 1.0, "memory/peak_rss_gib": 3.0}


@pytest.mark.parametrize(("platform", "counted"), [("darwin", 2 * GIB), ("freebsd", 2 * GIB // 1024)])
def test_without_proc_the_peak_remains(monkeypatch, platform, counted):
    import resource

    monkeypatch.setattr(memory_monitor, "_STATUS", Path("/nowhere"))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: type("Usage", (), {"ru_maxrss": counted}))
    assert process_memory() == {"memory/peak_rss_gib": 2.0}


def test_a_system_that_tells_nothing_gets_no_figure(monkeypatch):
    monkeypatch.setattr(memory_monitor, "_STATUS", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_memory() == {}
    assert decoding(MemoryMonitor()).names() == set()


def largest_of_ranks(rank):
    memory_monitor.process_memory = lambda: {"memory/rss_gib": 1.0 + rank, "memory/peak_rss_gib": 5.0 - rank}
    run = fit(Decoding(), MemoryMonitor(), devices=2, strategy="ddp")
    return run.of("memory/rss_gib"), run.of("memory/peak_rss_gib")


@pytest.mark.long
def test_ranks_give_their_largest():
    assert processes.run(largest_of_ranks) == [([2.0, 2.0], [5.0, 5.0])] * 2
