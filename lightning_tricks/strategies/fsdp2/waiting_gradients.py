"""Gradients that wait for the last micro-batch of an optimizer step, to be summed over the ranks once."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks._core.errors import UsageError

Reduction = Literal["micro_batch", "step"]


class WaitingGradients:
    """Tell FSDP2 in which micro-batches it sums gradients over the ranks.

    FSDP2 keeps the whole gradient that waits in a private field of each parameter, `unsharded_accumulated_grad`, read
    from torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

    Args:
        reduction: see `FSDP2Strategy.reduce_gradients`.

    Raises:
        UsageError: another word.
    """

    def __init__(self, reduction: Reduction) -> None:
        if reduction not in get_args(Reduction):
            raise UsageError(f"reduce_gradients={reduction!r}: give one of {', '.join(get_args(Reduction))}")
        self.reduction = reduction
        self.waiting = False

    def forget(self, module: nn.Module) -> None:
        """Drop what an earlier fit of a sharded module left, if it failed within a step: gathered weights, gradients.

        torch has a function for it since 2.13; before, FSDP2 refuses the next fit.
        """
        self.waiting = False
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(True, recurse=False)
        reset: Any = getattr(module, "reset_iter_state", None)
        if reset is not None:
            reset()
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # the same, where gradients are reduced in its own dtype
                    parameter._unsharded_param.grad = None

    def before_backward(self, module: nn.Module, accumulates: bool) -> None:
        """Choose for the backward pass of a micro-batch, after which others of the same step may follow."""
        if self.reduction == "micro_batch" or accumulates == self.waiting or not isinstance(module, FSDPModule):
            return
        self.waiting = accumulates
        module.set_requires_gradient_sync(not accumulates)

    def then_summed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer step, which fails where gradients wait after it."""

        def run() -> Any:
            loss = closure()
            if self.waiting:
                raise UsageError(
                    f"reduce_gradients={self.reduction!r}: training_step returned None for the last micro-batch of a "
                    "step, in whose backward pass gradients are summed over the ranks: take micro_batch"
                )
            return loss

        return run


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters that are gathered together."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            group = state._fsdp_param_group  # torch 2.13 has a list beside it, of one group here
            if group is not None:
                yield group
