"""Peaks: dense, by the names that drivers report, and none for what is not known."""

import doctest
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_tricks.accounting import measure_peak_flops, peak_flops, peak_source
from lightning_tricks.accounting import peak_flops as function
from lightning_tricks.accounting.peak_flops import PEAKS

module = sys.modules[function.__module__]

# bf16, in TFLOP/s
KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100 80GB PCIe": 312, "A100-PCIE-40GB": 312,
    "NVIDIA A10": 125, "NVIDIA A30": 165, "NVIDIA A40": 149.7, "NVIDIA L4": 121, "NVIDIA L40": 181, "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 154.85, "NVIDIA RTX 6000 Ada Generation": 364.4, "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 5090": 209.5, "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100": 989.5, "NVIDIA H100 PCIe": 756, "NVIDIA H100 80GB HBM2e": 756, "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989.5, "NVIDIA H200 NVL": 836, "NVIDIA H20": 148, "NVIDIA GH200 480GB": 989.5,
    "NVIDIA GH200 144G HBM3e": 989.5, "NVIDIA B200": 2250, "NVIDIA GB200": 2500, "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500, "AMD Instinct MI250X": 191.5, "AMD Instinct MI300X": 1307.4, "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI300X VF": 1307.4, "AMD Instinct MI355X": 2500, "TPU v4": 275, "TPU v5e": 197, "TPU v5p": 459,
    "TPU v6e": 918,
}  # fmt: skip


@pytest.mark.parametrize(("name", "teraflops"), KNOWN.items())
def test_a_device_is_known_by_the_name_that_its_driver_reports(name, teraflops):
    assert peak_flops(name, "bf16") == pytest.approx(teraflops * 1e12, rel=1e-12)
    assert peak_source(name).startswith("https://")


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "fp8", 1979), ("NVIDIA H200", "tf32", 494.5), ("NVIDIA H200", "fp32", 67),
        ("NVIDIA B200", "fp8", 4500), ("NVIDIA A100-SXM4-80GB", "fp16", 312), ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp8", None), ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp16", 130), ("Tesla V100-SXM2-32GB", "bf16", None), ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None), ("Tesla T4", "tf32", 8.1), ("AMD Instinct MI300X", "fp8", 2614.9),
        ("TPU v5p", "fp16", None), ("NVIDIA H200", "fp64", None), ("NVIDIA H200", "source", None),
    ],
)  # fmt: skip
def test_each_dtype_has_its_own_peak(name, dtype, teraflops):
    assert peak_flops(name, dtype) == (None if teraflops is None else pytest.approx(teraflops * 1e12, rel=1e-12))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A10G", "NVIDIA A40-48Q", "NVIDIA A40 Active",
        "GRID A100-10C",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA L400", "NVIDIA XH200", "NVIDIA", "", "cpu",
    ],
)  # fmt: skip
def test_a_slice_a_relative_and_a_stranger_are_unknown(name):
    assert peak_flops(name, "bf16") is None
    assert peak_flops(name, "fp16") is None
    assert peak_source(name) is None


@pytest.mark.parametrize(("name", "row"), PEAKS.items())
def test_the_figures_of_a_row_fit_together(name, row):
    # half precision runs at least at tf32's speed, tf32 at fp32's, fp8 at twice bf16's (a TPU v6e's at once)
    figures = [value for value in (row.fp32, row.tf32, row.fp16 or row.bf16) if value is not None]
    assert figures == sorted(figures)
    assert row.fp16 is None or row.bf16 in (None, row.fp16)
    if row.fp8 is not None:
        assert row.fp8 == pytest.approx(row.bf16 if name.startswith("TPU") else 2 * row.bf16, rel=0.02)
    assert re.fullmatch(r"https://\S+", row.source)


def test_the_examples_in_the_docstring_are_true():
    assert doctest.testmod(module).failed == 0


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
    # 256 cubed takes 0.67 ms at 50 GFLOP/s, 512 cubed 5.4, 1024 cubed 43; all but the eighth are 2 to 9 times slower
    Machine(monkeypatch, 50e9, slowed=[9, 3, 4, 2, 9, 3, 4, 1, *[2] * 100])
    assert measure_peak_flops("cpu", "fp32") == pytest.approx(50e9)


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
    assert 0.2 <= machine.wall < 0.5
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


@pytest.mark.long
def test_the_table_needs_no_torch():
    code = "import sys, lightning_tricks.accounting; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
