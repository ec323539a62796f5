"""Peak FLOP/s of a device at a dtype, from its datasheet: the denominator of MFU. Add a device to `PEAKS`.

All figures are dense: figures with sparsity, which vendors print first, are twice as high, and no training reaches
them. GeForce cards have half of their advertised fp16 and bf16 speed when they accumulate in fp32; the table has that
half, because training accumulates in fp32.

Sources: the figures were read in these tables; the link in a row is to the datasheet, if a table names it.
    https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md (data centre GPUs, TPUs)
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py (H100 NVL, H20, A6000, one MI250X die)
    https://github.com/karpathy/nanochat/blob/master/nanochat/common.py (H200 NVL, A30, A40, L4, GeForce)
    https://github.com/mosaicml/composer/blob/main/composer/callbacks/speed_monitor.py (A10, T4, V100)
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/throughput.py (L40, and
    fp32 and tf32 of A40, A6000, L4, 3090, 4090 and H200 NVL)
Computed by the ratios that hold within a family: bf16 of the RTX 6000 Ada is 4 times its fp32 (L40S, the same chip);
fp8 of L4, L40, RTX 6000 Ada and both NVL twice their bf16; tf32 of both NVL half of it; fp32 of the 5090 half of it.
"""

import functools
import operator
import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["peak_flops"]


class Peak(NamedTuple):
    """Dense TFLOP/s by dtype, and their source. None: the device cannot multiply that dtype, or no figure was found."""

    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_DGX = "https://resources.nvidia.com/en-us-dgx-systems"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"
_TPU = "https://docs.cloud.google.com/tpu/docs"
_PDF = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_NANOCHAT = "https://github.com/karpathy/nanochat/blob/master/nanochat/common.py"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_H100 = Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/h100/")
_H100_PCIE = Peak(51.0, 378.0, 756.0, 756.0, 1513, f"{_NVIDIA}/h100/")

# By the name that the driver reports, without the vendor's.
PEAKS = {
    "V100-SXM2": Peak(15.7, None, 125.0, None, None, _VOLTA),
    "V100-SXM3": Peak(15.7, None, 125.0, None, None, _VOLTA),
    "V100-PCIE": Peak(14.0, None, 112.0, None, None, _VOLTA),
    "V100S-PCIE": Peak(16.4, None, 130.0, None, None, _VOLTA),
    "T4": Peak(8.1, None, 65.0, None, None, f"{_PDF}/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    "A10": Peak(31.2, 62.5, 125.0, 125.0, None, f"{_PDF}/a10/pdf/a10-datasheet.pdf"),
    "A30": Peak(None, None, 165.0, 165.0, None, _NANOCHAT),
    "A40": Peak(37.4, 74.8, 149.7, 149.7, None, _NANOCHAT),
    "A100": Peak(19.5, 156.0, 312.0, 312.0, None, f"{_NVIDIA}/a100/"),
    "RTX A6000": Peak(38.7, 77.4, 154.85, 154.85, None, _TITAN),
    "GeForce RTX 3090": Peak(35.6, 35.6, 71.0, 71.0, None, _GA102),
    "L4": Peak(30.3, 60.0, 121.0, 121.0, 242, _ADA),
    "L40": Peak(90.5, 90.5, 181.0, 181.0, 362, _ADA),
    "L40S": Peak(91.6, 183.0, 362.0, 362.0, 733, f"{_NVIDIA}/l40s/"),
    "RTX 6000 Ada Generation": Peak(91.1, 182.2, 364.4, 364.4, 728.8, _ADA),
    "GeForce RTX 4090": Peak(82.6, 82.6, 165.2, 165.2, None, _ADA),
    "GeForce RTX 5090": Peak(104.8, 104.8, 209.5, 209.5, None, _NANOCHAT),
    "H20": Peak(None, None, 148.0, 148.0, None, _TITAN),
    "H100": _H100,
    "H100 PCIe": _H100_PCIE,
    "H100 80GB HBM2e": _H100_PCIE,
    "H100 NVL": Peak(None, 417.5, 835.0, 835.0, 1670, f"{_NVIDIA}/h100/"),
    "H200": Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/h200/"),
    "H200 NVL": Peak(60.0, 418.0, 836.0, 836.0, 1672, f"{_NVIDIA}/h200/"),
    "GH200": Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/grace-hopper-superchip/"),
    "B200": Peak(80.0, 1125, 2250, 2250, 4500, f"{_DGX}/dgx-b200-datasheet"),
    "B300": Peak(80.0, 1125, 2250, 2250, 4500, f"{_DGX}/dgx-b300-datasheet"),
    "GB200": Peak(80.0, 1250, 2500, 2500, 5000, f"{_NVIDIA}/gb200-nvl72/"),
    "GB300": Peak(80.0, 1250, 2500, 2500, 5000, f"{_NVIDIA}/gb300-nvl72/"),
    "MI250X": Peak(None, None, 191.5, 191.5, None, f"{_AMD}/mi200/mi250x.html"),  # one of two dies, torch's device
    "MI300X": Peak(163.4, 653.7, 1307.4, 1307.4, 2614.9, f"{_AMD}/mi300/mi300x.html"),
    "MI325X": Peak(163.4, 653.7, 1307.4, 1307.4, 2614.9, f"{_AMD}/mi300/mi325x.html"),
    "MI355X": Peak(157.3, None, 2500, 2500, 5000, f"{_AMD}/mi350/mi355x.html"),
    "TPU v4": Peak(None, None, None, 275.0, None, f"{_TPU}/v4"),
    "TPU v5e": Peak(None, None, None, 197.0, None, f"{_TPU}/v5e"),
    "TPU v5p": Peak(None, None, None, 459.0, None, f"{_TPU}/v5p"),
    "TPU v6e": Peak(None, None, None, 918.0, 918.0, f"{_TPU}/v6e"),
}

# Words that may follow a name and mean the same device: memory, socket. Not "Ti", "Laptop GPU", "D", "48Q", "MIG".
_SUFFIX = re.compile(r"\d+GB?|HBM\de?|SXM\d?|PCIE|PG5\d\d|AC|OAM|VF", re.IGNORECASE)
_VENDOR = re.compile(r"^(NVIDIA|AMD|Tesla|Instinct|Google|Cloud|\s)+(?=\S)", re.IGNORECASE)


def find_peak_row(device_name: str) -> Peak | None:
    """The row of the longest name in `PEAKS` with which the device's name begins; None if unknown, or a MIG slice."""
    words = _words(_VENDOR.sub("", device_name.strip()))
    for name in sorted(PEAKS, key=lambda name: -len(_words(name))):
        known = _words(name)
        if words[: len(known)] == known and all(_SUFFIX.fullmatch(word) for word in words[len(known) :]):
            return PEAKS[name]
    return None


def _words(name: str) -> list[str]:
    return re.split(r"[ -]+", name.casefold())


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of matrix products, None where the device or its dtype is not known.

    Args:
        device_name: as the driver reports it, such as `torch.cuda.get_device_name()`: "NVIDIA H100 80GB HBM3".
        dtype: `bf16`, `fp16`, `fp8`, `fp32` or `tf32`; a device without `tf32` computes it as `fp32`.

    Example:
        >>> peak_flops("NVIDIA H200", "bf16")
        989500000000000.0
        >>> peak_flops("NVIDIA H200 MIG 1g.18gb", "bf16") is None
        True
    """
    row = find_peak_row(device_name)
    if row is None or dtype not in Peak._fields[:-1]:
        return None
    teraflops = getattr(row, dtype)
    if teraflops is None and dtype == "tf32":
        teraflops = row.fp32
    return None if teraflops is None else round(teraflops * 1e12, -8)


def peak_source(device_name: str) -> str | None:
    """The datasheet's address, None for an unknown device."""
    row = find_peak_row(device_name)
    return None if row is None else row.source


def device_peak(
    device: Any, precision: str | int, dtype: str | None = None, given: float | None = None
) -> tuple[float | None, str]:
    """FLOP/s of one device, None where not known, and a line that says where the figure comes from.

    Args:
        device: a torch device; a CPU's peak is measured, once a process.
        precision: the Trainer's, such as `bf16-mixed`.
        dtype: of the matrix products, if `precision` does not name it, such as `fp8`.
        given: FLOP/s stated by the user, which replace the datasheet's.
    """
    import torch

    if given is not None:
        return given, f"MFU against {given / 1e12:.6g} TFLOP/s (given)"
    if dtype is None:
        tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        dtypes = {"bf16": "bf16", "16": "fp16", "32": "tf32" if tf32 else "fp32"}
        dtype = dtypes.get(str(precision).partition("-")[0])
    if device.type == "cpu":
        peak = _cpu_peak(dtype, torch.get_num_threads()) if dtype else None
        name, origin = "CPU", "measured by matrix products on this CPU"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak, origin = (peak_flops(name, dtype) if dtype else None), f"dense, {peak_source(name)}"
    if peak is None:
        return None, f"no MFU, for the peak of {name} at {dtype or precision} is not known: give peak_flops"
    return peak, f"MFU against {peak / 1e12:.6g} TFLOP/s ({name}, {dtype}, {origin})"


@functools.cache
def _cpu_peak(dtype: str, threads: int) -> float | None:
    return measure_peak_flops("cpu", dtype)


def measure_peak_flops(device: Any, dtype: str, seconds: float = 0.2) -> float | None:
    """FLOP/s of the fastest of many matrix products on a CPU, None for a dtype that torch cannot multiply there.

    No datasheet says what a CPU reaches with torch's number of threads. The figure holds on a busy machine too: of each
    product the processor time is taken, and only the fastest product counts. Draws no random numbers.

    Args:
        device: a CPU; another device would have to be waited for.
        dtype: `bf16`, `fp16`, `fp32` or `tf32`, which is fp32 there.
        seconds: how long to repeat the largest product, after three of each size.
    """
    import torch

    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
    if dtype not in types:
        return None
    cores = min(torch.get_num_threads(), available_cores())
    best, wall, sizes = 0.0, 0.0, [4096, 2048, 1024, 512, 256]
    with torch.no_grad():
        while sizes:  # small products cannot keep many cores busy, large ones take long
            size = sizes.pop()
            a = torch.full((size, size), 0.5, dtype=types[dtype], device=device)
            a @ a  # the first product of each size packs, allocates and wakes the threads
            fastest = min(seconds_of(functools.partial(operator.matmul, a, a), cores)[1] for _ in range(3))
            best = max(best, 2 * size**3 / fastest)
            if fastest > 0.01:  # a larger product would take too long
                break
        while wall < seconds:
            last, busy = seconds_of(functools.partial(operator.matmul, a, a), cores)
            best, wall = max(best, 2 * size**3 / busy), wall + last
    return best


def available_cores() -> int:
    """Number of cores on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def seconds_of(act: Callable[[], Any], cores: int) -> tuple[float, float]:
    """Seconds of a call, such as a product: on the wall clock, and as processor time divided by `cores`.

    The second is shorter if other programs used the cores in between. If the system's processor time is too coarse for
    one call, as on Windows, both are wall clock.
    """
    wall, processor = time.perf_counter(), time.process_time()
    act()
    wall, processor = time.perf_counter() - wall, (time.process_time() - processor) / cores
    fine = time.get_clock_info("process_time").resolution < 1e-4
    return wall, min(wall, processor) if fine and processor > 0 else wall
