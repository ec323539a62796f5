"""The GPUs of this machine, their driver, and the cuDNN and attention kernel that torch takes on them."""

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_tricks._errors import UsageError

_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
_CUDNN = "libcudnn*.so*"
HOPPER = 9  # major number of the compute capability


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
        foreign_cudnn: files and folders of another cuDNN than torch was installed with, which come before it.
    """

    count: int
    name: str
    capability: tuple[int, int]
    driver: str | None
    cuda: str | None
    cudnn: int | None
    attention: str
    foreign_cudnn: tuple[Path, ...]


def driver_version(file: Path = _DRIVER) -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", file.read_text("utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def foreign_cudnn(library_path: str, wheel: Path | None, loaded: Iterable[Path]) -> tuple[Path, ...]:
    """Where a cuDNN lies that comes before the one with which torch was installed; empty where none does.

    Args:
        library_path: content of `LD_LIBRARY_PATH`, by which cuDNN's main library also looks for its parts.
        wheel: folder of the libraries of the installed package; None: torch brings none, so any other one is right.
        loaded: library files of this process.
    """
    if wheel is None:
        return ()
    own = os.path.realpath(wheel)
    found = [file for file in loaded if file.match(_CUDNN) and os.path.realpath(file.parent) != own]
    for folder in filter(None, library_path.split(os.pathsep)):
        if os.path.realpath(folder) == own:
            break
        if any(Path(folder).glob(_CUDNN)):
            found.append(Path(folder))
    return tuple(dict.fromkeys(found))


def wheel_of_cudnn() -> Path | None:
    """Folder of the cuDNN that pip has installed for torch; None where there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return None
    folders = [Path(place) / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if any(folder.glob(_CUDNN))), None)


def loaded_libraries(maps: Path = _MAPS) -> list[Path]:
    """Library files of this process; none on a system without `/proc`."""
    try:
        lines = maps.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [Path(file) for file in dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines) if ".so" in file]


def gpus_here(head_dim: int = 128) -> GPUs | None:
    """The GPUs that torch can use here; None: none. Takes a context on the first one for a moment.

    Args:
        head_dim: of the attention whose kernel is asked for.
    """
    if not torch.cuda.is_available():
        return None
    cudnn = torch.backends.cudnn.version()
    attention = _attention(head_dim)  # loads cuDNN's parts, so it comes before the question which ones are loaded
    return GPUs(
        count=torch.cuda.device_count(),
        name=torch.cuda.get_device_name(0).removeprefix("NVIDIA "),
        capability=torch.cuda.get_device_capability(0),
        driver=driver_version(),
        cuda=torch.version.cuda,
        cudnn=cudnn,
        attention=attention,
        foreign_cudnn=foreign_cudnn(os.environ.get("LD_LIBRARY_PATH", ""), wheel_of_cudnn(), loaded_libraries()),
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


def attention_line(here: GPUs) -> str:
    """The line on attention; a warning on another cuDNN stands in it where it costs nothing that is known.

    Raises:
        UsageError: another cuDNN is loaded on Hopper, where cuDNN has the fastest attention.
    """
    line = f"{here.attention} in bf16, cuDNN {here.cudnn}"
    if not here.foreign_cudnn:
        return line
    places = ", ".join(map(str, here.foreign_cudnn[:2]))
    if here.capability[0] == HOPPER:
        raise UsageError(
            f"LD_LIBRARY_PATH: {places} comes before torch's own cuDNN (loaded: {here.cudnn}): attention on "
            f"{here.name} then loses cuDNN's kernels, a factor of 1.7 to 2.3: take the folder out of LD_LIBRARY_PATH"
        )
    return f"{line}; {places} comes before torch's own cuDNN: take the folder out of LD_LIBRARY_PATH if in doubt"
