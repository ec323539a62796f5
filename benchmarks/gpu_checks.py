"""The stages of gpu.py that compare no loops: yardstick, profile, checks of correctness, tests, formats' quality.

Each runs in a process of its own: `python -m benchmarks.gpu_checks STAGE --out FILE`.
"""

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_yardstick import yardstick
from benchmarks.stage_file import DEVICE_LOST

# What fp8 is compared with comes first.
PROOF = ("bf16_mixed", "fp8_tensorwise", "fp8_delayed", "bf16_true_stochastic", "fp32", "fp8_rowwise", "fp16")


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


def precision_proof(out: Path, dry: bool, seconds: float) -> None:
    """Train the small model of precision.py in the formats that a GPU computes otherwise than a CPU."""
    from benchmarks import precision

    device = ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    steps = ["--steps", "10"] if dry else []
    failed = []
    for name in PROOF:
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

    run_checks(out, dry, seconds)


def tests(out: Path, dry: bool, seconds: float) -> None:
    """Run the tests marked `gpu`; in a dry run one file of them, as all are skipped without a GPU."""
    from benchmarks.gpu_tests import DRY_FILES, FILES, run_tests

    run_tests(out, dry, seconds, DRY_FILES if dry else FILES)


def profile(out: Path, dry: bool, seconds: float) -> None:
    """Where does the time of a micro-batch go?"""
    from benchmarks.gpu_profile import run_profile

    run_profile(out, dry)


STAGES: dict[str, Callable[[Path, bool, float], None]] = {
    "yardstick": yardstick, "smoke": smoke, "profile": profile, "tests": tests, "precision_proof": precision_proof,
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
