"""Activation checkpointing for blocks of a model that we did not write: in place, names and classes as they were."""

import contextlib
import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks._activation_checkpointing import Mode, selective_contexts
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl_import

rank_zero_warn = pl_import("utilities.rank_zero").rank_zero_warn

# the names that blocks of transformers have for a cache of keys and values, or of a recurrence's state
_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params"})


def checkpoint_block(block: nn.Module, mode: Mode) -> None:
    """Have `block` keep less of its forward pass and compute it again in the backward pass.

    A block that is given a cache of keys and values runs without it, as in transformers' own checkpointing: the second
    run would append to the cache once more. A warning says so, once per class of blocks.

    Args:
        block: any module; its `forward` is replaced on the object, so hooks, names and class stay. Idempotent.
        mode: `full` keeps the inputs only; `selective` also attention's and every second linear layer's results, see
            `checkpointed`. Random numbers are drawn as in the first run.

    Raises:
        UsageError: in the forward pass, where the cache already holds tokens (such as a trained prefix).

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; `GradientCheckpointingLayer` in
        https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_layers.py.
    """
    if mode == "none" or "plain_forward" in vars(block):
        return
    options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
    without_cache = functools.partial(_without_cache, type(block).__name__, _layer_index(block))
    names = dict(enumerate(inspect.signature(block.forward).parameters))

    @functools.wraps(getattr(block.forward, "__func__", block.forward))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        args = tuple(without_cache(names.get(place, ""), value) for place, value in enumerate(args))
        kwargs = {name: without_cache(name, value) for name, value in kwargs.items()}
        return checkpoint(self.plain_forward, *args, use_reentrant=False, **options, **kwargs)

    # methods of the object, so that a deep copy of it runs its own weights
    block.__dict__.update(plain_forward=block.forward, forward=MethodType(forward, block))


def _layer_index(block: nn.Module) -> int:
    """Which part of a cache is this block's."""
    indices = (getattr(part, "layer_idx", None) for part in block.modules())
    return next((index for index in indices if isinstance(index, int)), 0)


def _without_cache(cls: str, layer: int, name: str, value: Any) -> Any:
    """The argument `name` of a block of class `cls`: None in place of a cache that the block would append to."""
    # a tuple of keys and values is read and never changed, so a second run does no harm
    if name not in _CACHES or value is None or isinstance(value, (tuple, Tensor)):
        return value
    length = 0
    with contextlib.suppress(AttributeError, ValueError):  # no cache of transformers; a layer that keeps no tokens
        length = value.get_seq_length(layer)
    if length:
        raise UsageError(
            f"activation_checkpointing: {name} of {cls} holds {int(length)} tokens already, and a block that runs "
            "again is given no cache: set activation_checkpointing to none"
        )
    if not torch.compiler.is_compiling():
        _warn(cls, name)
    return None


@functools.cache
def _warn(cls: str, name: str) -> None:
    rank_zero_warn(
        f"activation checkpointing runs {cls} without {name}, as a second run would append to it once more: "
        "set use_cache=False in the model's config"
    )
