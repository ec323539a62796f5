"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass.

`checkpointed` is for a model of ours, which calls it; `checkpoint_block` changes a block of any other model in place.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.attention.varlen  # registers `torch_attn::_varlen_attn`
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lightning_tricks.parallel.grouped_product  # noqa: F401, the operator
from lightning_tricks._core.errors import UsageError
from lightning_tricks.accounting.recompute import Mode

_aten = torch.ops.aten

# `cheap` and `selective` keep these results: they cost most to compute again, and take one layer width per token.
ATTENTION_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
# A linear layer without and with bias, and in fp8.
LINEAR_OPS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})
# The products of experts: gate, up, down; down too is read by the backward pass, for the weights of the router.
EXPERT_OPS = frozenset({torch.ops.lightning_tricks.grouped_product.default})
# The arguments by which a block of transformers takes a cache of keys and values, or the state of a recurrence.
_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params"})


def checkpointed(mode: Mode, function: Callable[..., Any], *args: Any, **numbers: Any) -> Any:
    """`function(*args)` with bitwise the same gradients; `mode` decides which results stay for the backward pass.

    - `none`: everything that autograd asks for.
    - `cheap`: the results of attention and of every linear layer; norms, rotations and activations, which take little
      time, run again.
    - `full`: the arguments only; the backward pass runs `function` again, about a third more compute.
    - `selective`: the results of attention and of every second linear layer (the first, the third, ...), so that about
      half of the matrix products run again; with `fused` of the first one only.

    Attention that a CPU in bf16 does by products runs again in all modes but `none`. Of experts, `selective` runs `up`
    again, and `full` all products. No mode runs a router again: experts that are chosen by numbers which differ in the
    last digit may be others, and the saved results would be those of other rows.

    Parameters keep their names. Dropout would differ in the second run: the random state is not saved.

    Args:
        mode: see above.
        function: called once now and once in the backward pass; takes tensors and returns one tensor, or a tuple.
        args: its arguments.
        numbers: `linears`: number of linear layers in `function`, if the result of the last one is only added to the
            residual stream: the backward pass does not read it, and it is not kept. `router`: of the linear layers,
            counted from 1, the one that chooses experts. `fused`: whether the first one is queries, keys and values
            together; every second one of so few would be nearly all results.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174. The choice of ops is torchtitan's,
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/parallelize.py (`_always_save_ops`,
    `_sac_save_list`), less the last linear layer.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **_options(mode, **numbers))


def checkpoint_block(block: nn.Module, mode: Mode) -> None:
    """Have `block` keep less of its forward pass and compute it again in the backward pass, as `checkpointed` does.

    A block that is given a cache of keys and values runs without it, as in transformers' own checkpointing: the second
    run would append to the cache once more.

    Args:
        block: any module; its `forward` is replaced on the object, so hooks, names and class stay. Idempotent.
        mode: see `checkpointed`. Random numbers are drawn as in the first run. A block's method `linear_numbers` may
            give the arguments `numbers` there.

    Raises:
        UsageError: in the forward pass, if the cache already holds tokens (such as a trained prefix).

    Source: `GradientCheckpointingLayer` in
        https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_layers.py.
    """
    if mode == "none" or "plain_forward" in vars(block):
        return
    indices = (getattr(part, "layer_idx", None) for part in block.modules())
    layer = next((index for index in indices if isinstance(index, int)), 0)  # of the block's part of a cache
    without_cache = functools.partial(_without_cache, type(block).__name__, layer)
    names = dict(enumerate(inspect.signature(block.forward).parameters))

    @functools.wraps(getattr(block.forward, "__func__", block.forward))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        own = _options(mode, **getattr(self, "linear_numbers", dict)())
        args = tuple(without_cache(names.get(position, ""), value) for position, value in enumerate(args))
        kwargs = {name: without_cache(name, value) for name, value in kwargs.items()}
        return checkpoint(self.plain_forward, *args, use_reentrant=False, **own, **kwargs)

    # methods of the object, so that a deep copy of it runs its own weights
    block.__dict__.update(plain_forward=block.forward, forward=MethodType(forward, block), checkpoint_mode=mode)


def mode_of(block: nn.Module) -> Mode:
    """How much a block computes again, by its own attribute or by `checkpoint_block`."""
    own = getattr(block, "checkpointing", None)
    return own if own in ("cheap", "selective", "full") else vars(block).get("checkpoint_mode", "none")


def _options(mode: Mode, linears: int | None = None, router: int | None = None, fused: bool = False) -> dict[str, Any]:
    """The options of `torch.utils.checkpoint` for one call; the arguments as in `checkpointed`."""
    keeping = mode in ("cheap", "selective") or router is not None
    return {"context_fn": functools.partial(_keeping_contexts, mode, linears, router, fused)} if keeping else {}


def _keeping_contexts(mode: Mode, linears: int | None, router: int | None, fused: bool) -> Any:
    # products of linear layers and of experts so far, in the forward pass and when running it again
    seen = {(ops, again): 0 for ops in (LINEAR_OPS, EXPERT_OPS) for again in (False, True)}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = (op in ATTENTION_OPS and mode != "full") or (op is _aten.topk.default and router is not None)
        for ops in (LINEAR_OPS, EXPERT_OPS):
            if op in ops:
                seen[ops, ctx.is_recompute] += 1
                number = seen[ops, ctx.is_recompute]
                if ops is EXPERT_OPS:
                    keeps = mode == "cheap" or (mode == "selective" and number % 3 != 2)
                else:
                    selected = mode == "cheap" or (mode == "selective" and (number == 1 if fused else number % 2 == 1))
                    keeps = number == router or (number != linears and selected)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


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
    return None
