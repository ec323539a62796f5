"""bf16 autocast where this machine multiplies bf16 faster, plain fp32 everywhere else: one recipe for every machine."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_tricks._trainer.lightning import rank_zero_info
from lightning_tricks._trainer.objects import trainer_of
from lightning_tricks.accounting import device_speed
from lightning_tricks.accounting.device_speed import has_fast_bf16
from lightning_tricks.precision.bf16_mixed import AutocastPrecision

__all__ = ["AutoPrecision"]


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
        ratio = device_speed.bf16_time_ratio(torch.get_num_threads())
        return f"bf16 takes {ratio:.2f} of fp32's time"
