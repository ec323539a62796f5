"""Memory and links of GPUs, from their datasheets; their peak FLOP/s stand in `peak_flops.PEAKS`, by the same names.

Memory is that of the datasheet, in 10^9 bytes. Of an H200 it is what torch reports, 139.8 GiB, where the datasheet says
141 GB (benchmarks/results/gpu-2026-11-26). On a machine with a GPU the plan takes what torch reports there.

Links count one direction, as a collective uses them; vendors print both directions together. A card without NVLink has
the link of its PCIe slot. Links between hosts belong to the cluster: the plan takes them by an option.

Sources: the figures were read in these tables, and agree with the datasheets that `peak_flops.PEAKS` links to.
    https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md (memory)
    https://github.com/stas00/ml-engineering/blob/master/network/README.md (links)
    https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB, 400 Gb/s
    a GPU between hosts)
    https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100 (B200: 1,440 GB of a DGX B200 over eight)
"""

from dataclasses import dataclass
from difflib import get_close_matches

from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.peak_flops import peak_flops, peak_source

NETWORK_GBITS = 400.0  # a GPU, between hosts: a ConnectX-7 for each GPU of a DGX H100


@dataclass(frozen=True)
class GPU:
    """A GPU as a plan sees it.

    Attributes:
        name: as the driver reports it, without the vendor's.
        memory_gb: 10^9 bytes, see above.
        link_gb: GB/s to the GPUs of the same host, one direction.
    """

    name: str
    memory_gb: float
    link_gb: float

    @property
    def bytes(self) -> int:
        """Memory in bytes."""
        return int(self.memory_gb * 10**9)

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of matrix products in `bf16`, `fp16`, `fp8`, `fp32` or `tf32`; None where it is not known."""
        return peak_flops(self.name, dtype)

    @property
    def source(self) -> str | None:
        """Address of the datasheet."""
        return peak_source(self.name)


# NVLink 3, 4, 5; AMD's Infinity Fabric between the eight GPUs of a board; PCIe 4 and 5 with 16 lanes
_NVLINK3, _NVLINK4, _NVLINK5, _XGMI, _PCIE4, _PCIE5 = 300.0, 450.0, 900.0, 448.0, 31.0, 63.0

# by the word of `--gpu`
GPUS = {
    "a100": GPU("A100", 80, _NVLINK3),
    "a100-40gb": GPU("A100", 40, _NVLINK3),
    "h100": GPU("H100", 80, _NVLINK4),
    "h100-96gb": GPU("H100", 96, _NVLINK4),
    "h100-pcie": GPU("H100 PCIe", 80, _PCIE5),
    "h200": GPU("H200", 150.1, _NVLINK4),
    "gh200": GPU("GH200", 96, _NVLINK4),
    "b200": GPU("B200", 180, _NVLINK5),
    "mi300x": GPU("MI300X", 192, _XGMI),
    "l40s": GPU("L40S", 48, _PCIE4),
    "l4": GPU("L4", 24, _PCIE4),
    "a10": GPU("A10", 24, _PCIE4),
    "t4": GPU("T4", 16, 16.0),
    "rtx-4090": GPU("GeForce RTX 4090", 24, _PCIE4),
    "rtx-5090": GPU("GeForce RTX 5090", 32, _PCIE5),
}


def link_of(name: str) -> float:
    """GB/s of the link of a GPU by the driver's name for it; of a card that is not in the table, that of PCIe 4."""
    rows = [
        gpu for gpu in GPUS.values() if name.startswith(gpu.name) and ("PCI" in name.upper()) == ("PCI" in gpu.name)
    ]
    return max(rows, key=lambda gpu: len(gpu.name)).link_gb if rows else _PCIE4


def find_gpu(word: str) -> GPU:
    """The GPU of a word, such as `h100`.

    Raises:
        UsageError: there is none.
    """
    key = word.casefold().replace(" ", "-").replace("_", "-")
    if key in GPUS:
        return GPUS[key]
    near = get_close_matches(key, GPUS, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"gpu={word}: {meant}known are {', '.join(GPUS)}; of another one give the figures: --gpu_memory_gb, "
        "--peak_tflops, --link_gb"
    )
