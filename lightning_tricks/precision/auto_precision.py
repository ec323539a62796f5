"""bf16 autocast where the hardware multiplies bf16 fast, plain fp32 everywhere else: one recipe for every machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_tricks._lightning import pl_import

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
else:
    Precision = pl_import("plugins.precision").Precision


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


class AutoPrecision(Precision):
    """Autocast to bf16 where that pays, fp32 otherwise; weights, gradients and optimizer stay fp32 in both cases.

    For recipes that are meant to run on any machine. A recipe for known hardware should name its precision instead
    (`trainer.precision: bf16-mixed`). Which one was chosen is `trainer.precision` and stands in the start-up summary.

    Gradients are clipped as in fp32, so fused optimizers work; weight casts are kept for the whole forward pass.
    """

    def __init__(self) -> None:
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._choose()

    def _choose(self) -> None:
        self.autocast = has_fast_bf16(self.device_type)
        self.precision = "bf16-mixed" if self.autocast else "32-true"

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Wrap a forward pass."""
        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.autocast):
            yield

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Leave the weights as they are; learn the device they will live on, where a Trainer says it."""
        trainer = getattr(module, "_trainer", None)
        if trainer is not None and trainer.strategy.root_device.type != self.device_type:
            self.device_type = trainer.strategy.root_device.type
            self._choose()
        return module
