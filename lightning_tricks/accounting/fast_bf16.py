"""Whether this machine multiplies matrices faster in bf16 than in fp32: known of a GPU's kind, measured on a CPU."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_tricks.accounting.peak_flops import available_cores, seconds_of

# bf16 below this share of the time of fp32: casts cost time beside the products, and a tie must not be decided by noise
FASTER = 0.9
_SIZE = 512  # rows, inputs and outputs of a linear layer
_SMALL = 256  # tells emulated products, which may take 80 times as long, before they cost seconds
_EMULATED = 3.0
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
    cores = min(torch.get_num_threads(), available_cores())
    products = {dtype: _products(size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    best: dict[torch.dtype, list[float]] = {}
    for number in range(rounds + 1):
        for dtype, acts in products.items():
            taken = [seconds_of(act, cores)[1] for act in acts]
            if number > 0:  # the first ones pack and allocate
                best[dtype] = [min(pair) for pair in zip(best.get(dtype, taken), taken, strict=True)]
    return {dtype: sum(taken) for dtype, taken in best.items()}


def _products(size: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """The output of a linear layer, and the gradients of its input and of its weight."""
    x, weight, gradient = (torch.full((size, size), 0.5, dtype=dtype, device="cpu") for _ in range(3))
    return [lambda: x @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ x]
