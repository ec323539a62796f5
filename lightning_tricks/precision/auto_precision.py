"""bf16 autocast where this machine multiplies bf16 faster, plain fp32 everywhere else: one recipe for every machine."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_tricks._lightning import rank_zero_info
from lightning_tricks._trainer import trainer_of
from lightning_tricks.accounting.peak_flops import available_cores, seconds_of
from lightning_tricks.precision.bf16_mixed import AutocastPrecision

# bf16 below this share of the time of fp32: casts cost time beside the products, and a tie must not be decided by noise
FASTER = 0.9
_SIZE = 512  # rows, inputs and outputs of a linear layer
_SMALL = 256  # tells emulated products, which may take 80 times as long, before they cost seconds
_EMULATED = 3.0
_FREE = 1.3  # more threads make a product faster than one thread by this factor at least, where the cores are free


def has_fast_bf16(device_type: str) -> bool:
    """Whether bf16 matrix products are faster than fp32 ones on this machine's `device_type`.

    On CUDA from compute capability 8.0 (Ampere). On a CPU it is measured, once a process and number of threads: bf16
    instructions (AVX512-BF16) without AMX make products four times faster on some CPUs and slower on others.

    Source: NVIDIA Ampere architecture whitepaper (bf16 tensor cores since 8.0).
    """
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return device_type == "cpu" and bf16_time_ratio(torch.get_num_threads()) < FASTER


@functools.cache
def bf16_time_ratio(threads: int) -> float:
    """Time of bf16 products over the time of fp32 ones, on this CPU with torch's number of threads, `threads`.

    Measured in about 100 ms: the three products of a linear layer, forward and backward, after a warm-up, in both types
    by turns; of each product the fastest counts. Where several threads are no faster than one, other programs use the
    cores, and products of one thread decide, which wait for nobody. Draws no random numbers.
    """
    try:
        torch.set_num_threads(1)
        small = _fastest(_SMALL, rounds=1)
        if _ratio(small) > _EMULATED:
            return _ratio(small)
        alone = _fastest(_SIZE, rounds=3)
    finally:
        torch.set_num_threads(threads)
    together = _fastest(_SIZE, rounds=3) if threads > 1 else alone
    return _ratio(together if all(alone[dtype] > _FREE * together[dtype] for dtype in alone) else alone)


def _ratio(seconds: dict[torch.dtype, float]) -> float:
    return seconds[torch.bfloat16] / seconds[torch.float32]


@torch.no_grad()
def _fastest(size: int, rounds: int) -> dict[torch.dtype, float]:
    """Seconds of the three products in each type, each at its fastest, with the current number of threads."""
    cores = min(torch.get_num_threads(), available_cores())
    products = {dtype: _products(size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    best: dict[torch.dtype, list[float]] = {}
    for number in range(rounds + 1):
        for dtype, acts in products.items():
            taken = [seconds_of(act, cores)[1] for act in acts]
            if number > 0:  # the first ones pack and allocate
                best[dtype] = [min(pair) for pair in zip(best.get(dtype, taken), taken, strict=True)]
    return {dtype: sum(taken) for dtype, taken in best.items()}


def _products(size: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """The output of a linear layer, and the gradients of its input and of its weight."""
    x, weight, gradient = (torch.full((size, size), 0.5, dtype=dtype, device="cpu") for _ in range(3))
    return [lambda: x @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ x]


class AutoPrecision(AutocastPrecision):
    """Autocast to bf16 where that is faster, fp32 otherwise; weights, gradients and optimizer state are always fp32.

    For recipes that run on any machine. A recipe for known hardware should name its precision instead
    (`plugins: [BF16Mixed]`). On a CPU the choice is measured when training starts, by rank 0 for all ranks; it is in
    the line of MFUMonitor and in the checkpoint, and a run that is resumed on a CPU goes on in the precision in which
    it began. `trainer.precision` tells the choice. In bf16 it does the same as `BF16Mixed`; on a CPU, however, FSDP2
    gathers weights in fp32, so that a checkpoint may still decide.
    """

    def __init__(self) -> None:
        super().__init__()
        self._measured: str | None = None  # for the run; measured anew by each
        self._began_in: str | None = None  # the choice of the checkpoint from which the run goes on

    @property
    def precision(self) -> Literal["bf16-mixed", "32-true"]:  # type: ignore[override]
        """`bf16-mixed` or `32-true`; until training starts, what this process would choose."""
        chosen = self._began_in or self._measured or self._measure()
        return "bf16-mixed" if chosen == "bf16-mixed" else "32-true"

    @property
    def choice(self) -> str | None:
        """A sentence that tells the reason of the choice; None on a GPU, whose kind decides."""
        if self.device != "cpu":
            return None
        if self._began_in not in (None, self._measured):
            return f"AutoPrecision: {self.precision}, in which the run began"
        return f"AutoPrecision: {self.precision}, as {self._reason()}"

    @property
    def fsdp2_policy(self) -> MixedPrecisionPolicy:
        """The same as `BF16Mixed`'s on a GPU where bf16 is fast; elsewhere the weights' own dtype, under autocast."""
        casts = self.device != "cpu" and self.precision == "bf16-mixed"
        return super().fsdp2_policy if casts else MixedPrecisionPolicy()

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Find out the weights' device, and choose, the same on all ranks; the weights do not change."""
        module = super().convert_module(module)
        self._measured, self._began_in = self._measure(), None
        trainer = trainer_of(module)
        if trainer is not None and self.device == "cpu":
            self._measured = trainer.strategy.broadcast(self._measured)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Wrap a forward pass."""
        return super().forward_context() if self.precision == "bf16-mixed" else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The choice on a CPU; a GPU makes it again."""
        return {"precision": self.precision} if self.device == "cpu" else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the precision in which the run began, if it goes on on a CPU, and say where it differs."""
        saved, here = state_dict["precision"], self.precision
        if saved == here:
            return
        if self.device != "cpu":
            rank_zero_info(f"AutoPrecision: the run began in {saved} on a CPU, and goes on in {here} on {self.device}")
            return
        self._began_in = saved
        rank_zero_info(
            f"AutoPrecision: the run goes on in {saved}, in which it began; "
            f"a run that starts here would choose {here}, as {self._reason()}"
        )

    def _measure(self) -> str:
        return "bf16-mixed" if has_fast_bf16(self.device) else "32-true"

    @staticmethod
    def _reason() -> str:
        return f"bf16 products take {bf16_time_ratio(torch.get_num_threads()):.2f} of the time of fp32 on this CPU"
