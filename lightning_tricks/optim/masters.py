"""fp32 masters of bf16 weights: where an optimizer's state keeps them, and how fp32 weights take them over."""

import torch
from torch.optim import Optimizer

from lightning_tricks._tensors import local

MASTER = "master"  # key in the state of a parameter


@torch.no_grad()
def take_masters(optimizer: Optimizer) -> None:
    """Give each fp32 weight the value of its master, after a checkpoint of bf16 weights is loaded; drop the masters.

    A value of a master that does not round to its weight comes from other weights, and is only dropped. Meant for
    `optimizer.register_load_state_dict_post_hook`.
    """
    for param, state in optimizer.state.items():
        master = state.pop(MASTER, None)
        if master is None or param.dtype != torch.float32:
            continue
        here, there = local(param), local(master)
        if here.shape == there.shape:
            there = there.to(here.device, torch.float32)
            here.copy_(torch.where(there.bfloat16() == here, there, here))
