"""Let a callback see the gradient norm of a step before ZeRO's optimizer makes the step, and refuse the step.

DeepSpeed clips and steps in one call, and skips only a step that overflowed. So this module has DeepSpeed take a
refused step for an overflow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._replaced import replaced


@contextmanager
def judged_step(engine: Any, zero: Any, refuses: Callable[[Tensor], bool]) -> Iterator[None]:
    """Inside the `with`, skip each step for which `refuses` returns True: weights and state stay, a scheduler goes on.

    Args:
        engine: DeepSpeed's engine.
        zero: its optimizer, of any ZeRO stage.
        refuses: called once a step, on every rank, with the norm of all gradients before the clip and without the loss
            scale, a scalar fp32 tensor; infinite if a gradient is infinite or NaN, or if DeepSpeed found an overflow.
    """
    measure = "scaled_global_norm" if hasattr(zero, "scaled_global_norm") else "_get_norm_groups"  # stages 1 and 2, 3
    measured, update_scale = getattr(zero, measure), zero._update_scale
    norms: list[Any] = []

    def measure_and_keep(*args: Any, **kwargs: Any) -> Any:
        result = measured(*args, **kwargs)
        norms[:] = result if isinstance(result, list | tuple) else [result]
        return result

    def judge_and_update_scale(overflow: bool) -> None:
        scale = zero.loss_scale
        update_scale(overflow)
        parts = torch.stack(
            [torch.as_tensor(norm, dtype=torch.float32, device=engine.device) for norm in norms or [-1]]
        )
        norms.clear()
        # DeepSpeed writes -1 for a norm that is not finite
        fine = (parts >= 0).all() & torch.tensor(not overflow, device=parts.device)
        norm = torch.where(fine, torch.linalg.vector_norm(parts) / scale, torch.inf)
        if refuses(norm) and not zero.overflow:
            zero.overflow = True
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()  # which DeepSpeed leaves out after an overflow

    with replaced(zero, measure, measure_and_keep), replaced(zero, "_update_scale", judge_and_update_scale):
        yield
