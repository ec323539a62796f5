"""The stages of gpu.py that time no training: the yardstick, the tests marked `gpu`, the proof of each format.

Each runs in a process of its own: `python -m benchmarks.gpu_checks STAGE --out FILE`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace `path` by the result, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def yardstick(out: Path, dry: bool) -> None:
    """What a plain bf16 matrix product reaches here: 8192 cubed on random data (zeros would run faster and cooler)."""
    size, repeats = (256, 5) if dry else (8192, 50)
    device = "cpu" if dry else "cuda"
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    for _ in range(repeats):
        a @ b
    seconds = []
    for _ in range(repeats):
        if dry:
            start = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - start)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            a @ b
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
    rates = sorted(2 * size**3 / s / 1e12 for s in seconds)
    figures = {"size": size, "tflops_median": statistics.median(rates), "tflops_min": rates[0], "tflops_max": rates[-1]}
    write(out, {"stage": "yardstick", "machine": machine.describe(), **figures})


def tests(out: Path, dry: bool) -> None:
    """Run the tests marked `gpu`; counts, and the names of those that failed. Fails if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        where = "tests/gpu" if dry else "tests"  # in a dry run they are all skipped; one folder shows as much
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", where]
        code = subprocess.run([*command, f"--junitxml={report}", "-p", "no:cacheprovider"], cwd=ROOT).returncode
        cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped}
    write(out, {"stage": "tests", **counts, "failures": bad})
    if bad or code:
        sys.exit(code or 1)


def precision_proof(out: Path, dry: bool) -> None:
    """Train the small model of precision.py in the formats that a GPU computes otherwise than a CPU."""
    formats = ["fp8_tensorwise", "fp32", "bf16_mixed", "fp8_rowwise", "bf16_true_stochastic", "fp16"]
    command = [sys.executable, "-m", "benchmarks.precision", *formats[: 2 if dry else None], "--out", str(out)]
    options = ["--steps", "20", "--device", "cpu"] if dry else ["--device", "cuda"]
    sys.exit(subprocess.run([*command, *options, "--only_peak_lr"], cwd=ROOT).returncode)


def require_device(dry: bool) -> None:
    """End with one line where there is no GPU to measure; keep a dry run to one thread."""
    if not dry and not torch.cuda.is_available():
        sys.exit("no CUDA device: run it where there is one, or with --dry")
    if dry:
        torch.set_num_threads(1)


def main() -> None:
    """Command line, for gpu.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["yardstick", "tests", "precision_proof"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    require_device(options.dry)
    {"yardstick": yardstick, "tests": tests, "precision_proof": precision_proof}[options.stage](
        options.out, options.dry
    )


if __name__ == "__main__":
    main()
