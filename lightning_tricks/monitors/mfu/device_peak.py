"""The peak that a Trainer's products are measured against, and where the figure comes from."""

import functools
from typing import Any

import torch

from lightning_tricks.accounting.peak_flops import measure_peak_flops, peak_flops, peak_source


def peak_dtype(precision: str | int, device: torch.device) -> str | None:
    """The dtype of the products under `Trainer(precision=...)`: bf16, fp16, fp32 or tf32; None for another."""
    name = str(precision).partition("-")[0]
    if name == "32":
        tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if tf32 else "fp32"
    return {"bf16": "bf16", "16": "fp16"}.get(name)


def find_peak(trainer: Any, given: float | None) -> tuple[float | None, str]:
    """FLOP/s of one device for the Trainer's precision, and a line that says where the figure comes from.

    A precision plugin that multiplies in another type than its name says has an attribute `peak_dtype`, such as "fp8".
    """
    if given is not None:
        return given, f"MFU against {given / 1e12:.6g} TFLOP/s (given)"
    device = trainer.strategy.root_device
    dtype = getattr(trainer.precision_plugin, "peak_dtype", None) or peak_dtype(trainer.precision, device)
    if device.type == "cpu":
        peak = _cpu_peak(dtype, torch.get_num_threads()) if dtype else None
        name, origin = "CPU", "measured by matrix products on this CPU"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak, origin = (peak_flops(name, dtype) if dtype else None), f"dense, {peak_source(name)}"
    if peak is None:
        return None, f"no MFU, for the peak of {name} at {dtype or trainer.precision} is not known: give peak_flops"
    return peak, f"MFU against {peak / 1e12:.6g} TFLOP/s ({name}, {dtype}, {origin})"


@functools.cache  # one measurement a process
def _cpu_peak(dtype: str, threads: int) -> float | None:
    return measure_peak_flops("cpu", dtype)
