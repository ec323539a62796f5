"""Datasheets: dense peaks by the names that drivers report, none for what is not known; memory and links of GPUs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tricks.accounting import peak_flops, peak_source
from lightning_tricks.accounting.gpus import GPUS, PEAKS, find_gpu, link_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

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


def test_a_gpu_is_found_by_its_word_with_its_peak_and_datasheet():
    card = find_gpu("H100")
    assert (card.memory_gb, card.link_gb, card.peak("bf16")) == (80, 450.0, 989.5e12)
    assert card.source == "https://www.nvidia.com/en-us/data-center/h100/"
    assert all(one.peak("bf16") or word == "t4" for word, one in GPUS.items())


def test_the_memory_of_an_h200_is_that_which_torch_reported():
    machine = json.loads((RESULTS / "gpu-2026-11-26" / "yardstick.json").read_text())["machine"]
    assert machine["gpu"] == "NVIDIA H200"
    assert machine["gpu_memory_gib"] == round(find_gpu("h200").bytes / 2**30, 1)


@pytest.mark.parametrize(
    ("name", "link"),
    [("H100 80GB HBM3", 450), ("H100 PCIe", 63), ("A100-SXM4-40GB", 300), ("A100-PCIE-40GB", 31), ("L40S", 31),
     ("GH200 480GB", 450), ("Tesla T4", 31), ("B200", 900)],
)  # fmt: skip
def test_a_link_is_found_by_the_drivers_name(name, link):
    assert link_of(name) == link


@pytest.mark.long
def test_the_table_needs_no_torch():
    code = "import sys, lightning_tricks.accounting; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
