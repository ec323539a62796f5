"""A stand-in for a number in a GPU's memory beside gradients on the host, as FSDP2 keeps them with `cpu_offload`."""

from typing import Any

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)


class OnDevice(Tensor):
    """Says that it lies on a GPU. No operation takes it beside numbers on the host; a copy to the host that nobody
    waits for has not arrived when it is read: it is NaN.
    """

    device = property(lambda self: CUDA)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:
            device = next((each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.device)), None)
            if device is not None and device.type == "cpu":
                arrived = torch.full((), torch.nan) if kwargs.get("non_blocking") else args[0].as_subclass(Tensor)
                return arrived.clone()
            return args[0]
        flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
        if any(isinstance(each, Tensor) and not isinstance(each, cls) and each.dim() for each in flat):
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")
        return super().__torch_function__(func, types, args, kwargs)


def on_device(number: float) -> Tensor:
    """A 0-dim fp32 number there."""
    return torch.tensor(number).as_subclass(OnDevice)
