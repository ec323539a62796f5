"""The dtype in which a linear layer works: its own, or autocast's."""

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer gives for `x`: its own, or autocast's.

    A result used by several layers is cast to it once; left alone, autocast casts it for each of them, forward and
    backward (2 to 5 % of a training step on a CPU).
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if autocasts(device) else x.dtype


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device, such as "cuda".

    Traced by `torch.compile` into a constant. `torch.amp.is_autocast_available` would not be in torch 2.11.
    """
    # The meta device, where a model is planned and not run, knows no autocast and would raise.
    return device != "meta" and torch.is_autocast_enabled(device)
