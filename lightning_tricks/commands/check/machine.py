"""The GPUs of this machine, their driver, and the cuDNN and attention kernel that torch takes on them."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class GPUs:
    """The GPUs that torch can use.

    Attributes:
        count: of this host.
        name: of the first one.
        capability: its compute capability, such as (9, 0).
        driver: its version; None where it is not known.
        cuda: of torch.
        cudnn: version that torch reports, such as 91900; None: none.
        attention: kernel that torch chooses for rows of tokens in bf16.
    """

    count: int
    name: str
    capability: tuple[int, int]
    driver: str | None
    cuda: str | None
    cudnn: int | None
    attention: str


def driver_version(file: Path = _DRIVER) -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", file.read_text("utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def gpus_here(head_dim: int = 128) -> GPUs | None:
    """The GPUs that torch can use here; None: none. Takes a context on the first one for a moment.

    Args:
        head_dim: of the attention whose kernel is asked for.
    """
    if not torch.cuda.is_available():
        return None
    return GPUs(
        count=torch.cuda.device_count(),
        name=torch.cuda.get_device_name(0).removeprefix("NVIDIA "),
        capability=torch.cuda.get_device_capability(0),
        driver=driver_version(),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        attention=_attention(head_dim),
    )


def _attention(head_dim: int) -> str:
    query = torch.zeros(1, 2, 256, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    chosen = torch._fused_sdp_choice(query, query, query, is_causal=True)
    return torch.nn.attention.SDPBackend(chosen).name.lower() if chosen >= 0 else "none"


def why_no_gpu(driver: str | None, cuda: str | None) -> str | None:
    """The reason that torch can use no GPU on a machine that has a driver for some; None without a driver."""
    if driver is None:
        return None
    if cuda is None:
        return f"the machine has NVIDIA's driver {driver}, and torch {torch.__version__} is built without CUDA"
    return f"torch is built for CUDA {cuda}, and finds no GPU with the driver {driver}: it is too old, or none is free"
