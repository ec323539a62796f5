"""What plain work reaches on this GPU, for comparison with everything else: products, a copy, the head's loss."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.stage_file import resume, write
from lightning_tricks.models.linear_cross_entropy import linear_cross_entropy

# tokens, width and vocabulary of a micro-batch: of the recipe gpt2_124m, and of Llama-3-8B
HEADS = {"gpt2_124m": (65536, 768, 50304), "llama8b": (8192, 4096, 128256)}


def burst(work: Callable[[], Any], repeats: int, cuda: bool) -> list[float]:
    """Seconds of each of `repeats` calls, each waited for: the clock is as high as a cool chip allows."""
    seconds = []
    for _ in range(repeats):
        if not cuda:
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return seconds


def sustained(work: Callable[[], Any], seconds: float, cuda: bool) -> float:
    """Seconds a call when nothing waits in between for so long: at the clock that the power limit leaves."""
    calls, at_a_time, start = 0, 20 if cuda else 1, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(at_a_time):
            work()
        calls += at_a_time
        if cuda:  # so that the queue holds no more than a few dozen products
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def products(size: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """A product of two square matrices of random data in each type; zeros run faster and cooler."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    made: dict[str, Callable[[], Tensor]] = {"bf16": lambda: a @ b}
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        low, other = (t.to(torch.float8_e4m3fn) for t in (a, b))
        one = torch.ones((), device=device)
        made["fp8"] = lambda: torch._scaled_mm(
            low, other.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return made


def yardstick(out: Path, dry: bool, seconds: float) -> None:
    """Products of random data in bf16 and fp8, in bursts and for some seconds, and a copy on the device."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    size, repeats, hold, copied = (256, 5, 0.05, 2**20) if dry else (8192, 50, 5.0, 2**33)
    fresh = {"stage": "yardstick", "machine": machine.describe(), "dry": dry, "size": size, "sustained_seconds": hold}
    result: dict[str, Any] = resume(out, fresh)
    if "copy_tb_per_second" in result:
        return  # of an earlier call
    if cuda:
        result["attention"] = machine.attention_backend(32, 32, 4096, 128, torch.bfloat16)
    for dtype, product in products(size, device).items():
        prefix = "" if dtype == "bf16" else f"{dtype}_"
        burst(product, repeats, cuda)
        rates = sorted(2 * size**3 / s / 1e12 for s in burst(product, repeats, cuda))
        result |= {f"{prefix}tflops_median": statistics.median(rates), f"{prefix}tflops_max": rates[-1]}
        write(out, result)
        with machine.device_state(cuda) as state:
            result[f"{prefix}tflops_sustained"] = 2 * size**3 / sustained(product, hold, cuda) / 1e12
            result |= {prefix + name: value for name, value in state.summary().items()}
        write(out, result)
    source, target = (torch.empty(copied, device=device, dtype=torch.uint8) for _ in "st")
    source.random_(0, 256)
    copy: Callable[[], Tensor] = lambda: target.copy_(source)  # noqa: E731
    burst(copy, 3, cuda)
    # read once and written once
    result |= {"copy_bytes": copied, "copy_tb_per_second": 2 * copied / statistics.median(burst(copy, 10, cuda)) / 1e12}
    write(out, result)


def head_times(shape: tuple[int, int, int], device: str, repeats: int) -> dict[str, float]:
    """Milliseconds of head and loss, forward and backward: in slices, compiled and not, and their three products alone.

    Args:
        shape: tokens, width, vocabulary.
        device: `cuda` or `cpu`.
        repeats: calls whose median it is.
    """
    tokens, width, vocabulary = shape
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def loss(compiled: bool) -> None:
        # the loss itself computes the gradients
        torch.autograd.grad(linear_cross_entropy(x, weight, labels, compiled=compiled), (x, weight))

    def three_products() -> None:
        head = weight.detach().to(torch.bfloat16)
        for rows in x.detach().split(8192):
            logits = F.linear(rows, head)
            logits @ head, logits.T @ rows

    times = {}
    for name, work in {
        "eager": lambda: loss(False), "compiled": lambda: loss(True), "products": three_products,
    }.items():  # fmt: skip
        burst(work, 2, device == "cuda")
        times[f"{name}_ms"] = 1000 * statistics.median(burst(work, repeats, device == "cuda"))
    return times
