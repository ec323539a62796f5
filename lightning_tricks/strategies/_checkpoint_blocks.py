"""Activation checkpointing for blocks of a model that we did not write: in place, names and classes as they were."""

import functools
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks.models.checkpointing import selective_contexts

Mode = Literal["none", "full", "selective"]


def checkpoint_block(block: nn.Module, mode: Mode) -> None:
    """Have `block` keep less of its forward pass and compute it again in the backward pass.

    Args:
        block: any module; its `forward` is replaced on the object, so hooks, names and class stay. Twice is as once.
        mode: `full` keeps the inputs only; `selective` also attention's and every second linear layer's results, see
            `checkpointed`. Random numbers are drawn as in the first run.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174.
    """
    if mode == "none" or "plain_forward" in vars(block):
        return
    options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}

    @functools.wraps(getattr(block.forward, "__func__", block.forward))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        return checkpoint(self.plain_forward, *args, use_reentrant=False, **options, **kwargs)

    # methods of the object, so that a deep copy of it runs its own weights
    block.__dict__.update(plain_forward=block.forward, forward=MethodType(forward, block))
