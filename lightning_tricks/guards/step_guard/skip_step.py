"""Make an optimizer skip its next step where a number on the device says so; the host reads it only where it must."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lightning_tricks._replaced import replaced
from lightning_tricks.optim import skips_on_device
from lightning_tricks.optim.grad_scaler import add_overflow
from lightning_tricks.optim.keep_settings_on_load import parts_of


def skipping(optimizer: Any, scaler: Any, skip: Tensor) -> AbstractContextManager[Any]:
    """Let the step that `optimizer` makes inside the `with` change nothing if `skip` is 1, and be as usual if it is 0.

    Args:
        optimizer: unwrapped; its gradients are ready.
        scaler: the GradScaler of fp16, which has unscaled them, and which skips the step as one that overflowed; None
            without one.
        skip: 0-dim fp32 tensor on the gradients' device, 0 or 1. It is read on the host only for optimizers that
            cannot decide on the device: they lose their gradients, and skip parameters that have none. The counts that
            some keep in their groups stay as they are.
    """
    if scaler is not None:
        add_overflow(scaler, optimizer, skip)
    elif skips_on_device(optimizer):
        return replaced(optimizer, "found_inf", skip)
    elif bool(skip):
        optimizer.zero_grad(set_to_none=True)
        return _same_counts(optimizer)
    return nullcontext()


@contextmanager
def _same_counts(optimizer: Any) -> Iterator[None]:
    """Undo what the next step changes in the optimizer's groups: counts, such as those of schedule-free optimizers.

    It is undone at the end of the step, before anybody saves it; later steps count. What recipe and schedule set stays
    theirs.
    """
    names = {option for part in parts_of(optimizer) for option in inspect.signature(type(part)).parameters}
    own = names | {"params", "lr", "initial_lr", "weight_decay"}
    before = [{key: value for key, value in group.items() if key not in own} for group in optimizer.param_groups]

    def undo(*_: Any) -> None:
        for group, counts in zip(optimizer.param_groups, before, strict=True):
            group.update(counts)
            counts.clear()

    hook = optimizer.register_step_post_hook(undo)
    try:
        yield
    finally:
        hook.remove()
