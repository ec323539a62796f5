"""The stages of gpu.py that compare no loops: yardstick, checks of correctness, tests marked `gpu`, formats' quality.

Each runs in a process of its own: `python -m benchmarks.gpu_checks STAGE --out FILE`.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.stage_file import DEVICE_LOST, write

PROOF = ("fp8_tensorwise", "fp32", "bf16_mixed", "fp8_rowwise", "bf16_true_stochastic", "fp16")


def clean_up() -> None:
    """Give back the memory of a run; leave the process if the device does not answer any more."""
    gc.collect()  # a Trainer and its module hold each other
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(DEVICE_LOST)


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


def yardstick(out: Path, dry: bool, seconds: float) -> None:
    """What plain work reaches here: bf16 products of random data (zeros run faster and cooler), and a copy."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    size, repeats, hold, copied = (256, 5, 0.05, 2**20) if dry else (8192, 50, 5.0, 2**33)
    result: dict[str, Any] = {"stage": "yardstick", "machine": machine.describe(), "size": size}
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    result["attention"] = machine.attention_backend(32, 32, 2048, 64, torch.bfloat16) if cuda else None
    product: Callable[[], Tensor] = lambda: a @ b  # noqa: E731
    burst(product, repeats, cuda)
    rates = sorted(2 * size**3 / s / 1e12 for s in burst(product, repeats, cuda))
    result |= {"tflops_median": statistics.median(rates), "tflops_min": rates[0], "tflops_max": rates[-1]}
    write(out, result)
    with machine.device_state(cuda) as state:
        result["tflops_sustained"] = 2 * size**3 / sustained(product, hold, cuda) / 1e12
        result |= {"sustained_seconds": hold, **state.summary()}
    write(out, result)
    source, target = (torch.empty(copied, device=device, dtype=torch.uint8) for _ in "st")
    source.random_(0, 256)
    copy: Callable[[], Tensor] = lambda: target.copy_(source)  # noqa: E731
    burst(copy, 3, cuda)
    # read once and written once
    result |= {"copy_bytes": copied, "copy_tb_per_second": 2 * copied / statistics.median(burst(copy, 10, cuda)) / 1e12}
    write(out, result)


def precision_proof(out: Path, dry: bool, seconds: float) -> None:
    """Train the small model of precision.py in the formats that a GPU computes otherwise than a CPU."""
    from benchmarks import precision

    device = ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    steps = ["--steps", "10"] if dry else []
    failed = []
    for name in PROOF[: 1 if dry else None]:
        try:  # each run is on disk when it ends
            precision.main([name, "--out", str(out), "--only_peak_lr", *device, *steps])
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


def require_device(dry: bool) -> None:
    """End with one line where there is no GPU to measure; keep a dry run to one thread."""
    if not dry and not torch.cuda.is_available():
        sys.exit("no CUDA device: run it where there is one, or with --dry")
    if dry:
        torch.set_num_threads(1)


def smoke(out: Path, dry: bool, seconds: float) -> None:
    """Does each part train on this device, and do the losses come out as they should?"""
    from benchmarks.gpu_smoke import run_checks

    run_checks(out, seconds)


def tests(out: Path, dry: bool, seconds: float) -> None:
    """Run the tests marked `gpu`; in a dry run one file of them, as all are skipped without a GPU."""
    from benchmarks.gpu_tests import DRY_FILES, FILES, run_tests

    run_tests(out, seconds, DRY_FILES if dry else FILES)


STAGES: dict[str, Callable[[Path, bool, float], None]] = {
    "yardstick": yardstick, "smoke": smoke, "tests": tests, "precision_proof": precision_proof,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line, for gpu.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long it may take")
    options = parser.parse_args(arguments)
    require_device(options.dry)
    STAGES[options.stage](options.out, options.dry, options.seconds)


if __name__ == "__main__":
    main()
