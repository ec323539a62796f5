"""Start every rank with the values of rank 0, whether they were made on each rank, on rank 0 alone, or not yet."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lightning_tricks._errors import UsageError


def broadcast_from_rank0(module: nn.Module, device: torch.device) -> None:
    """Give the plain parameters and buffers of `module` rank 0's values, in place; every rank must call.

    Args:
        module: holds all of its values, on any device.
        device: one that the process group communicates on.
    """
    if dist.get_world_size() == 1:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        there = tensor.detach().to(device)
        dist.broadcast(there, src=0)
        tensor.detach().copy_(there)


class Whole:
    """Rank 0's values of a module that the other ranks hold on the meta device, set aside until it is sharded.

    Args:
        module: on rank 0 with values, which it loses to this; on the other ranks meta.
    """

    def __init__(self, module: nn.Module) -> None:
        self.state: dict[str, Any] = {}
        self.buffers: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            self.state = {name: value.detach() for name, value in module.state_dict(keep_vars=True).items()}
            self.buffers = {name: buffer for name, buffer in module.named_buffers() if name not in self.state}
            module.to("meta")

    def scatter(self, module: nn.Module, device: torch.device) -> None:
        """Fill the sharded `module`, which is meta, on every rank; every rank must call."""
        module.to_empty(device=device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, self.state, options=options)
        persistent = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name not in persistent:
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
                there = buffer.to(device)
                dist.broadcast(there, src=0)
                buffer.copy_(there)
        self.state, self.buffers = {}, {}


def same_random_state(device: torch.device) -> None:
    """Give all ranks the CPU's random state of rank 0, which alone may have drawn weights; every rank must call."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())


def refuse_unfillable(module: Any) -> None:
    """Refuse a module with meta tensors and no `init_weights`, before anything is sharded.

    Raises:
        UsageError: as said.
    """
    if has_meta(module) and not callable(getattr(module, "init_weights", None)):
        raise UsageError(
            f"{type(module).__name__} builds parameters on the meta device and has no method init_weights to fill "
            "them: write one, or build it as always and set init_on_rank_0 of the strategy"
        )


def fill_meta(module: Any, device: torch.device) -> None:
    """Give a module that was built on the meta device its values, by its own `init_weights`."""
    if has_meta(module):
        module.to_empty(device=device)
        module.init_weights()


def has_meta(module: nn.Module) -> bool:
    """Whether some parameter or buffer has no values yet."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
