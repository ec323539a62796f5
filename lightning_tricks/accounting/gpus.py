"""Datasheets of GPUs: peak FLOP/s at a dtype, the denominator of MFU, for which add a device to `PEAKS`; memory, links.

All figures are dense: figures with sparsity, which vendors print first, are twice as high, and no training reaches
them. GeForce cards have half of their advertised fp16 and bf16 speed when they accumulate in fp32; the table has that
half, because training accumulates in fp32.

Memory is in 10^9 bytes. Of an H200 it is what torch reports, 139.8 GiB, where the datasheet says 141 GB
(benchmarks/results/gpu-2026-11-26). On a machine with a GPU the plan takes what torch reports there.

Links count one direction, as a collective uses them; vendors print both directions together. A card without NVLink has
the link of its PCIe slot. Links between hosts belong to the cluster: the plan takes them by an option.

Sources: the figures were read in these tables; the link in a row is to the datasheet, if a table names it.
    https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md (data centre GPUs, TPUs; memory)
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py (H100 NVL, H20, A6000, one MI250X die)
    https://github.com/karpathy/nanochat/blob/master/nanochat/common.py (H200 NVL, A30, A40, L4, GeForce)
    https://github.com/mosaicml/composer/blob/main/composer/callbacks/speed_monitor.py (A10, T4, V100)
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/throughput.py (L40, and
    fp32 and tf32 of A40, A6000, L4, 3090, 4090 and H200 NVL)
    https://github.com/stas00/ml-engineering/blob/master/network/README.md (links)
    https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB, 400 Gb/s
    a GPU between hosts)
    https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100 (B200: 1,440 GB of a DGX B200 over eight)
Computed by the ratios that hold within a family: bf16 of the RTX 6000 Ada is 4 times its fp32 (L40S, the same chip);
fp8 of L4, L40, RTX 6000 Ada and both NVL twice their bf16; tf32 of both NVL half of it; fp32 of the 5090 half of it.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from lightning_tricks._core.errors import UsageError

__all__ = ["peak_flops"]

NETWORK_GBITS = 400.0  # a GPU, between hosts: a ConnectX-7 for each GPU of a DGX H100


class Peak(NamedTuple):
    """Dense TFLOP/s by dtype, and their source. None: the device cannot multiply that dtype, or no figure was found."""

    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_DGX = "https://resources.nvidia.com/en-us-dgx-systems"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"
_TPU = "https://docs.cloud.google.com/tpu/docs"
_PDF = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_NANOCHAT = "https://github.com/karpathy/nanochat/blob/master/nanochat/common.py"
_TITAN = "https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_H100 = Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/h100/")
_H100_PCIE = Peak(51.0, 378.0, 756.0, 756.0, 1513, f"{_NVIDIA}/h100/")

# By the name that the driver reports, without the vendor's.
PEAKS = {
    "V100-SXM2": Peak(15.7, None, 125.0, None, None, _VOLTA),
    "V100-SXM3": Peak(15.7, None, 125.0, None, None, _VOLTA),
    "V100-PCIE": Peak(14.0, None, 112.0, None, None, _VOLTA),
    "V100S-PCIE": Peak(16.4, None, 130.0, None, None, _VOLTA),
    "T4": Peak(8.1, None, 65.0, None, None, f"{_PDF}/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    "A10": Peak(31.2, 62.5, 125.0, 125.0, None, f"{_PDF}/a10/pdf/a10-datasheet.pdf"),
    "A30": Peak(None, None, 165.0, 165.0, None, _NANOCHAT),
    "A40": Peak(37.4, 74.8, 149.7, 149.7, None, _NANOCHAT),
    "A100": Peak(19.5, 156.0, 312.0, 312.0, None, f"{_NVIDIA}/a100/"),
    "RTX A6000": Peak(38.7, 77.4, 154.85, 154.85, None, _TITAN),
    "GeForce RTX 3090": Peak(35.6, 35.6, 71.0, 71.0, None, _GA102),
    "L4": Peak(30.3, 60.0, 121.0, 121.0, 242, _ADA),
    "L40": Peak(90.5, 90.5, 181.0, 181.0, 362, _ADA),
    "L40S": Peak(91.6, 183.0, 362.0, 362.0, 733, f"{_NVIDIA}/l40s/"),
    "RTX 6000 Ada Generation": Peak(91.1, 182.2, 364.4, 364.4, 728.8, _ADA),
    "GeForce RTX 4090": Peak(82.6, 82.6, 165.2, 165.2, None, _ADA),
    "GeForce RTX 5090": Peak(104.8, 104.8, 209.5, 209.5, None, _NANOCHAT),
    "H20": Peak(None, None, 148.0, 148.0, None, _TITAN),
    "H100": _H100,
    "H100 PCIe": _H100_PCIE,
    "H100 80GB HBM2e": _H100_PCIE,
    "H100 NVL": Peak(None, 417.5, 835.0, 835.0, 1670, f"{_NVIDIA}/h100/"),
    "H200": Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/h200/"),
    "H200 NVL": Peak(60.0, 418.0, 836.0, 836.0, 1672, f"{_NVIDIA}/h200/"),
    "GH200": Peak(67.0, 494.5, 989.5, 989.5, 1979, f"{_NVIDIA}/grace-hopper-superchip/"),
    "B200": Peak(80.0, 1125, 2250, 2250, 4500, f"{_DGX}/dgx-b200-datasheet"),
    "B300": Peak(80.0, 1125, 2250, 2250, 4500, f"{_DGX}/dgx-b300-datasheet"),
    "GB200": Peak(80.0, 1250, 2500, 2500, 5000, f"{_NVIDIA}/gb200-nvl72/"),
    "GB300": Peak(80.0, 1250, 2500, 2500, 5000, f"{_NVIDIA}/gb300-nvl72/"),
    "MI250X": Peak(None, None, 191.5, 191.5, None, f"{_AMD}/mi200/mi250x.html"),  # one of two dies, torch's device
    "MI300X": Peak(163.4, 653.7, 1307.4, 1307.4, 2614.9, f"{_AMD}/mi300/mi300x.html"),
    "MI325X": Peak(163.4, 653.7, 1307.4, 1307.4, 2614.9, f"{_AMD}/mi300/mi325x.html"),
    "MI355X": Peak(157.3, None, 2500, 2500, 5000, f"{_AMD}/mi350/mi355x.html"),
    "TPU v4": Peak(None, None, None, 275.0, None, f"{_TPU}/v4"),
    "TPU v5e": Peak(None, None, None, 197.0, None, f"{_TPU}/v5e"),
    "TPU v5p": Peak(None, None, None, 459.0, None, f"{_TPU}/v5p"),
    "TPU v6e": Peak(None, None, None, 918.0, 918.0, f"{_TPU}/v6e"),
}

# Words that may follow a name and mean the same device: memory, socket. Not "Ti", "Laptop GPU", "D", "48Q", "MIG".
_SUFFIX = re.compile(r"\d+GB?|HBM\de?|SXM\d?|PCIE|PG5\d\d|AC|OAM|VF", re.IGNORECASE)
_VENDOR = re.compile(r"^(NVIDIA|AMD|Tesla|Instinct|Google|Cloud|\s)+(?=\S)", re.IGNORECASE)


def find_peak_row(device_name: str) -> Peak | None:
    """The row of the longest name in `PEAKS` with which the device's name begins; None if unknown, or a MIG slice."""
    words = _words(_VENDOR.sub("", device_name.strip()))
    for name in sorted(PEAKS, key=lambda name: -len(_words(name))):
        known = _words(name)
        if words[: len(known)] == known and all(_SUFFIX.fullmatch(word) for word in words[len(known) :]):
            return PEAKS[name]
    return None


def _words(name: str) -> list[str]:
    return re.split(r"[ -]+", name.casefold())


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of matrix products, None where the device or its dtype is not known.

    Args:
        device_name: as the driver reports it, such as `torch.cuda.get_device_name()`: "NVIDIA H100 80GB HBM3".
        dtype: `bf16`, `fp16`, `fp8`, `fp32` or `tf32`; a device without `tf32` computes it as `fp32`.

    Example:
        >>> peak_flops("NVIDIA H200", "bf16")
        989500000000000.0
        >>> peak_flops("NVIDIA H200 MIG 1g.18gb", "bf16") is None
        True
    """
    row = find_peak_row(device_name)
    if row is None or dtype not in Peak._fields[:-1]:
        return None
    teraflops = getattr(row, dtype)
    if teraflops is None and dtype == "tf32":
        teraflops = row.fp32
    return None if teraflops is None else round(teraflops * 1e12, -8)


def peak_source(device_name: str) -> str | None:
    """The datasheet's address, None for an unknown device."""
    row = find_peak_row(device_name)
    return None if row is None else row.source


@dataclass(frozen=True)
class GPU:
    """A GPU as a plan sees it.

    Attributes:
        name: as the driver reports it, without the vendor's.
        memory_gb: 10^9 bytes.
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
