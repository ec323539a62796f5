"""Give every rank rank 0's values of tensors, however they lie in memory."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast(tensors: Iterable[Tensor], device: torch.device, group: Any = None) -> None:
    """Give tensors on any device rank 0's values, in place; every rank must call.

    A process group sends memory as it lies, so a tensor that is not dense goes as a contiguous copy. A tensor that has
    rank 0's values already is not written: whoever watches the writes to it (`Tensor._version`) is told of none.

    Args:
        tensors: parameters, buffers or others, of the same shapes on all ranks; expanded ones have equal values along
            the expanded dimensions on rank 0.
        device: one on which the process group communicates.
        group: the process group, whose first rank has the values; None for the default one.
    """
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            own = tensor.detach()
            there = own.to(device).contiguous()
            dist.broadcast(there, group=group, group_src=0)
            if torch.equal(own, there.to(own.device)):
                continue
            if 0 in own.stride():  # expanded: elements that share memory are written once
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in own.stride())
                own, there = own[once], there[once]
            own.copy_(there)
