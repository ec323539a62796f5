"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_tricks._errors import UsageError

Mode = Literal["none", "full", "selective"]

_aten = torch.ops.aten

# Always kept by `selective`: dearest to compute again, and one layer width a token to keep.
ATTENTION_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
# A linear layer without and with bias.
LINEAR_OPS = frozenset({_aten.mm.default, _aten.addmm.default})


def check_mode(mode: Mode | None) -> Mode:
    """`mode`, or `none` for None, which a recipe may say instead.

    Raises:
        UsageError: another word.
    """
    if mode is not None and mode not in get_args(Mode):
        raise UsageError(f"activation_checkpointing={mode!r}: give one of {', '.join(get_args(Mode))}")
    return mode or "none"


def checkpointed(mode: Mode, function: Callable[..., Tensor], *args: Any, linears: int | None = None) -> Tensor:
    """`function(*args)` with the same gradients to the last bit, keeping what `mode` says for the backward pass.

    - `none`: everything autograd asks for.
    - `full`: the arguments only; the backward pass runs `function` again, about a third more compute.
    - `selective`: also the results of attention and of every second linear layer (the first, the third, ...), so that
      about half of the matrix products run again. Attention that a CPU in bf16 does by products runs again too.

    Parameters keep their names. Dropout would differ in the second run: the random state is not saved.

    Args:
        mode: what to keep.
        function: called once now and once in the backward pass, from tensors to one tensor.
        args: its arguments.
        linears: how many linear layers `function` runs, where the result of the last one is only added to the residual
            stream: the backward pass does not read it, and `selective` does not keep it. None: not known.

    Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174. The choice of ops is torchtitan's,
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/parallelize.py (`_always_save_ops`,
    `_sac_save_list`), less the last linear layer.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = functools.partial(selective_contexts, linears)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)


def selective_contexts(linears: int | None = None) -> Any:
    """What `torch.utils.checkpoint` takes as `context_fn`: keeps attention's and every second linear layer's result.

    Args:
        linears: as in `checkpointed`.
    """
    seen = {False: 0, True: 0}  # linear layers so far, in the forward pass and when running it again

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op in LINEAR_OPS:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] % 2 == 1 and seen[ctx.is_recompute] != linears:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
