"""Which machine and which versions a figure belongs to: written into every result file."""

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe() -> dict[str, Any]:
    """Date (UTC), processor, GPU and versions, ready for JSON."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    packages = {}
    for name in ("torch", "lightning", "pytorch-lightning", "torchao", "deepspeed", "triton", "jsonargparse"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": packages,
    }


def today() -> str:
    """The date (UTC) as file names carry it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
