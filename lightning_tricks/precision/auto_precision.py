"""bf16 autocast where the hardware multiplies bf16 fast, plain fp32 everywhere else: one recipe for every machine."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_tricks.precision._autocast import AutocastPrecision


def has_fast_bf16(device_type: str) -> bool:
    """Whether bf16 matrix products are faster than fp32 ones on this machine's `device_type`.

    True on CUDA from compute capability 8.0 (Ampere), on CPUs with AVX512-BF16 or AMX-BF16 instructions. Emulated
    bf16 does not count: on a CPU without those instructions it is slower than fp32.

    Source: `torch.cpu.get_capabilities`; NVIDIA Ampere architecture whitepaper (bf16 tensor cores since 8.0).
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    if device_type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


class AutoPrecision(AutocastPrecision):
    """Autocast to bf16 where that is faster, fp32 otherwise; weights, gradients and optimizer state are always fp32.

    For recipes that run on any machine. A recipe for known hardware should name its precision instead
    (`plugins: [BF16Mixed]`). `trainer.precision` and the start-up summary tell the choice. In bf16 it does the same as
    `BF16Mixed`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._choose()

    def _choose(self) -> None:
        self.precision = "bf16-mixed" if has_fast_bf16(self.device) else "32-true"

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """The same as `BF16Mixed`'s where bf16 is fast; elsewhere the weights' own dtype."""
        return super().fsdp2_policy if self.precision == "bf16-mixed" else MixedPrecisionPolicy()

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Find out the weights' device, and whether FSDP2 casts; the weights do not change."""
        module = super().convert_module(module)
        self._choose()
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Wrap a forward pass."""
        return super().forward_context() if self.precision == "bf16-mixed" else nullcontext()
