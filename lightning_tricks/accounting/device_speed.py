"""Speed of this machine's matrix products: the peak for MFU, and whether bf16 beats fp32. Measured on a CPU."""

import functools
import math
import operator
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_tricks.accounting.gpus import peak_flops

# bf16 below this share of the time of fp32: casts cost time beside the products, and a tie must not be decided by noise
FASTER = 0.9
_SIZE = 512  # rows, inputs and outputs of a linear layer
_SMALL = 256  # tells emulated products, which may take 80 times as long, before they cost seconds
_EMULATED = 3.0
_TRUSTED = 0.03  # s: the system counts the time of a thread that is running at its ticks, every 1 to 10 ms
_FREE = 1.3  # more threads make a product faster than one thread by this factor at least, where the cores are free


def has_fast_bf16(device_type: str) -> bool:
    """Whether bf16 matrix products are faster than fp32 ones on this machine's `device_type`.

    On CUDA from compute capability 8.0 (Ampere). On a CPU it is measured, once a process and number of threads: bf16
    instructions (AVX512-BF16) without AMX make products four times faster on some CPUs and slower on others.

    Source: NVIDIA Ampere architecture whitepaper (bf16 tensor cores since 8.0).
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return device_type == "cpu" and bf16_time_ratio(torch.get_num_threads()) < FASTER


@functools.cache
def bf16_time_ratio(threads: int) -> float:
    """Time of bf16 products over the time of fp32 ones, on this CPU with torch's number of threads, `threads`.

    Measured in about 100 ms: the three products of a linear layer, forward and backward, after a warm-up, in both types
    by turns; of each product the fastest counts. Where several threads are no faster than one, other programs use the
    cores, and products of one thread decide, which wait for nobody. Draws no random numbers. Products have data also
    inside FakeTensorMode.
    """
    with _disable_current_modes():
        return _measured(threads)


def _measured(threads: int) -> float:
    try:
        torch.set_num_threads(1)
        small = _fastest(_SMALL, rounds=1)
        if _ratio(small) > _EMULATED:
            return _ratio(small)
        alone = _fastest(_SIZE, rounds=3)
    finally:
        torch.set_num_threads(threads)
    together = _fastest(_SIZE, rounds=3) if threads > 1 else alone
    return _ratio(together if all(alone[dtype] > _FREE * together[dtype] for dtype in alone) else alone)


def _ratio(seconds: dict[torch.dtype, float]) -> float:
    return seconds[torch.bfloat16] / seconds[torch.float32]


@torch.no_grad()
def _fastest(size: int, rounds: int) -> dict[torch.dtype, float]:
    """Seconds of the three products in each type, each at its fastest, with the current number of threads."""
    products = {dtype: _products(size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    best: dict[torch.dtype, list[float]] = {}
    for number in range(rounds + 1):
        for dtype, acts in products.items():
            taken = list(map(wall_seconds, acts))
            if number > 0:  # the first ones pack and allocate
                best[dtype] = [min(pair) for pair in zip(best.get(dtype, taken), taken, strict=True)]
    return {dtype: sum(taken) for dtype, taken in best.items()}


def _products(size: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """The output of a linear layer, and the gradients of its input and of its weight."""
    x, weight, gradient = (torch.full((size, size), 0.5, dtype=dtype, device="cpu") for _ in range(3))
    return [lambda: x @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ x]


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
    if given is not None:
        return given, f"peak {given / 1e12:.6g} TFLOP/s (given)"
    if dtype is None:
        tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        dtypes = {"bf16": "bf16", "16": "fp16", "32": "tf32" if tf32 else "fp32"}
        dtype = dtypes.get(str(precision).partition("-")[0])
    if device.type == "cpu":
        peak = _cpu_peak(dtype, torch.get_num_threads()) if dtype else None
        name, origin = "CPU", "measured"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak, origin = (peak_flops(name, dtype) if dtype else None), "dense"
    if peak is None:
        return None, f"no MFU, for the peak of {name} at {dtype or precision} is not known: give peak_flops"
    return peak, f"peak {peak / 1e12:.4g} TFLOP/s ({name}, {dtype}, {origin})"


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
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
    if dtype not in types:
        return None
    cores = min(torch.get_num_threads(), available_cores())
    best, sizes = 0.0, [4096, 2048, 1024, 512, 256]
    with torch.no_grad():
        while sizes:  # small products cannot keep many cores busy, large ones take long
            size = sizes.pop()
            a = torch.full((size, size), 0.5, dtype=types[dtype], device=device)
            product = functools.partial(operator.matmul, a, a)
            product()  # the first one of each size packs, allocates and wakes the threads
            fastest = min(wall_seconds(product) for _ in range(3))
            repeats = math.ceil(_TRUSTED / fastest)
            best = max(best, 2 * size**3 / busy_seconds(product, repeats, cores))
            if fastest > 0.01:  # a larger product would take too long
                break
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            best = max(best, 2 * size**3 / busy_seconds(product, repeats, cores))
    return best


def available_cores() -> int:
    """Number of cores on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def wall_seconds(act: Callable[[], Any]) -> float:
    """Seconds of a call on the wall clock."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def busy_seconds(act: Callable[[], Any], repeats: int, cores: int) -> float:
    """Seconds of one of several calls, such as products: the shorter of wall time, and processor time over `cores`.

    The second is shorter if other programs used the cores in between. If the system's processor time is too coarse, as
    on Windows, it is wall time.
    """
    processor = time.process_time()
    wall = wall_seconds(lambda: [act() for _ in range(repeats)])
    processor = (time.process_time() - processor) / cores
    fine = time.get_clock_info("process_time").resolution < 1e-4
    return (min(wall, processor) if fine and processor > 0 else wall) / repeats
