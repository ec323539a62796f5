"""The speed of a CPU's products: that of the fastest one, also on a busy machine, and without random numbers."""

from types import SimpleNamespace

import pytest
import torch

from lightning_tricks.accounting import device_speed as module
from lightning_tricks.accounting.device_speed import measure_peak_flops


class Machine:
    """A CPU in simulated time: how fast each product runs, and how long other programs hold the processor in it.

    Args:
        flops: per second of processor time, of one core.
        slowed: factors by which products take longer than that on the processor, the rest take 1.
        held: wall seconds by processor seconds of each product, as the machine is busy with other programs.
        cores: that a product uses at once.
    """

    def __init__(self, monkeypatch, flops, slowed=(), held=1.0, cores=1, resolution=1e-9) -> None:
        self.flops, self.slowed, self.held, self.cores = flops, iter(slowed), held, cores
        self.wall = self.processor = 0.0
        self.sizes = []
        clock = SimpleNamespace(resolution=resolution)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(module.time, "process_time", lambda: self.processor // resolution * resolution)
        monkeypatch.setattr(module.time, "get_clock_info", lambda name: clock)
        monkeypatch.setattr(module, "available_cores", lambda: cores)
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(torch, "full", lambda shape, *args, **options: self.matrix(shape[0]))

    def matrix(self, size):
        machine = self

        class Matrix:
            def __matmul__(self, other):
                seconds = 2 * size**3 / machine.flops * next(machine.slowed, 1.0)  # on all cores together
                machine.processor += seconds
                machine.wall += seconds / machine.cores * machine.held
                machine.sizes.append(size)

        return Matrix()


def test_the_peak_is_that_of_the_fastest_product(monkeypatch):
    # 256 cubed takes 1.3 ms at half the speed, 512 cubed 11: three together; the last three are fast
    slowed = [2] * 200
    Machine(monkeypatch, 50e9, slowed=slowed)
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(25e9)
    machine = Machine(monkeypatch, 50e9, slowed=slowed)
    measure_peak_flops("cpu", "fp32")
    slowed[len(machine.sizes) - 3 : len(machine.sizes)] = [1] * 3
    Machine(monkeypatch, 50e9, slowed=slowed)
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(50e9)


def test_time_of_other_threads_that_is_counted_late_makes_no_product_faster(monkeypatch):
    # two threads, of which the system counts the second one's time at its ticks, every 4 ms
    machine = Machine(monkeypatch, 50e9, cores=2)
    monkeypatch.setattr(module.time, "process_time", lambda: machine.wall + machine.wall // 0.004 * 0.004)
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(100e9, rel=0.08)


@pytest.mark.parametrize("cores", [1, 4])
def test_a_busy_machine_has_the_peak_of_an_idle_one(monkeypatch, cores):
    # other programs take three quarters of the time from every single product
    Machine(monkeypatch, 50e9, held=4.0, cores=cores)
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(cores * 50e9)


def test_a_processor_clock_that_is_too_coarse_is_not_believed(monkeypatch):
    Machine(monkeypatch, 50e9, held=2.0, resolution=0.0156)  # as on Windows
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(25e9)


def test_products_grow_until_they_fill_the_processor_and_no_further(monkeypatch):
    machine = Machine(monkeypatch, 50e9)
    measure_peak_flops("cpu", "bf16")
    assert max(machine.sizes) == 1024
    assert 0.2 <= machine.wall < 0.6
    # without instructions for the dtype a product of 256 cubed takes a third of a second
    machine = Machine(monkeypatch, 1e8)
    assert measure_peak_flops("cpu", "fp16") == pytest.approx(1e8)
    assert set(machine.sizes) == {256}


def test_a_dtype_that_cpus_cannot_multiply_has_no_peak():
    assert measure_peak_flops("cpu", "fp8") is None


def test_measuring_draws_no_random_numbers():
    state = torch.get_rng_state()
    assert measure_peak_flops("cpu", "bf16", seconds=0.0) > 0
    assert torch.equal(torch.get_rng_state(), state)
