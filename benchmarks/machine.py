"""The machine and the versions that a figure belongs to, and the GPU's clock, power and temperature meanwhile."""

import datetime
import importlib.util
import logging
import os
import platform
import statistics
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

# What nvidia-smi is asked for once in each process: limits, and why the clock is lower than it could be.
_SMI = ("driver_version", "power.limit", "clocks.max.sm", "clocks.mem", "clocks_event_reasons.active", "pstate")
_SAMPLE_SECONDS = 0.5
_LIBRARIES = ("pytorch-optimizer", "heavyball")  # of optimizers


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines below errors, and no warnings, of what is measured."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit(folder: Path) -> str:
    """The commit of a checkout, with `+` behind it where files differ from it."""
    git = ["git", "-C", str(folder)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def describe() -> dict[str, Any]:
    """Date (UTC), processor, GPU with driver and limits, and versions, ready for JSON."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    packages = {}
    for name in (
        "torch",
        "lightning",
        "pytorch-lightning",
        "torchao",
        "deepspeed",
        "triton",
        "jsonargparse",
        *_LIBRARIES,
    ):
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
        "gpu_uuid": gpu and str(gpu.uuid),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": packages,
        **(_cuda() if gpu else {}),
    }


def _cuda() -> dict[str, Any]:
    return {
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "nvidia_smi": nvidia_smi(),
        "nvml": importlib.util.find_spec("pynvml") is not None,
    }


def nvidia_smi() -> dict[str, str]:
    """Driver, limits and clocks of torch's device 0 as nvidia-smi tells them; empty where there is none."""
    # not --id=0: CUDA_VISIBLE_DEVICES may have chosen another, and nvidia-smi counts without it
    device = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader", device]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_SMI, (cell.strip() for cell in said.split(",")), strict=False))


class DeviceState:
    """Clock, power and temperature of the GPU, sampled in a thread between `start` and `summary`.

    Reads the driver's counters and gives no work to the device. Where they cannot be read, every figure is None; torch
    reads them by the package nvidia-ml-py.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._ended = threading.Event()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            try:
                clock, watt = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000
                self.samples.append((clock, watt, torch.cuda.temperature()))
            except Exception:  # no NVML, or one that does not answer: then there is nothing to say
                return

    def start(self) -> None:
        """Drop the samples taken so far, such as those of a warm-up."""
        self.samples.clear()

    def summary(self) -> dict[str, float | None]:
        """MHz, watts and degrees Celsius since `start`."""
        clocks, watts, degrees = zip(*self.samples, strict=True) if self.samples else ([], [], [])
        return {
            "sm_clock_mhz": statistics.median(clocks) if clocks else None,
            "sm_clock_mhz_min": min(clocks, default=None),
            "power_watts": round(statistics.median(watts), 1) if watts else None,
            "temperature_celsius_max": max(degrees, default=None),
        }


@contextmanager
def device_state(cuda: bool) -> Iterator[DeviceState]:
    """A `DeviceState` that is sampled as long as this context lasts; without a GPU it stays empty."""
    state = DeviceState()
    thread = threading.Thread(target=state._sample, daemon=True)
    if cuda:
        thread.start()
    try:
        yield state
    finally:
        state._ended.set()
        if cuda:
            thread.join(timeout=5)


def attention_backend(heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """The kernel that torch chooses for causal attention of this shape on the GPU, such as `CUDNN_ATTENTION`."""
    q, k = (
        torch.empty(1, n, length, head_dim, device="cuda", dtype=dtype, requires_grad=True) for n in (heads, kv_heads)
    )
    try:
        chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=kv_heads != heads)
        return str(SDPBackend(chosen).name)
    except Exception as error:  # not public: another torch may not have it, and no figure depends on it
        return f"not known: {error}"


def today() -> str:
    """The date (UTC) as file names carry it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
