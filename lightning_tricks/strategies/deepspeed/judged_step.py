"""Let somebody look at a step's gradient norm before ZeRO's optimizer makes the step, and refuse it.

DeepSpeed clips and steps in one call, and has one way to skip: a step that overflowed. This takes that way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._replaced import replaced


@contextmanager
def judged_step(engine: Any, zero: Any, refuses: Callable[[Tensor], bool]) -> Iterator[None]:
    """Inside the `with`, a step that `refuses` is skipped: weights and state stay, a scheduler goes on.

    Args:
        engine: DeepSpeed's engine.
        zero: its optimizer, of any ZeRO stage.
        refuses: called once a step, on every rank, with the norm of all gradients before the clip, unscaled; infinite
            if one is infinite or NaN, or if DeepSpeed itself has found an overflow.
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
