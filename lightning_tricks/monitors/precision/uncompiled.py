"""Run a compiled module once more in eager, so that hooks inside it are called, and undo every side effect."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only


def can_run_uncompiled(module: nn.Module) -> bool:
    """Whether `module` may be run once more: not if FSDP2 gathers parts of it, because its hooks count the runs."""
    inner = _uncompiled(module)
    return not any(isinstance(part, FSDPModule) for part in inner.modules() if part is not inner)


def run_uncompiled(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keep_mode: Collection[nn.Module]
) -> None:
    """Run the forward of a compiled `module` in eager, for the sake of the hooks on what is inside.

    It runs without gradients, in evaluation mode, under the autocast that is on. Random states, buffers and training
    flags are then what they were. Hooks of `module` itself are not called, but parameters that FSDP2 shards are
    gathered and inputs cast as its hook would do; the module's own run, which comes next, finds them gathered. Modules
    in `keep_mode` stay in training mode, for they would compute something else in evaluation.
    """
    inner = _uncompiled(module)
    for part in {id(module): module, id(inner): inner}.values():
        if isinstance(part, FSDPModule):
            part.unshard()
            args, kwargs = _cast_inputs(part, args, kwargs)
    cuda = sorted({tensor.device.index for tensor in inner.parameters() if tensor.device.type == "cuda"})
    with (
        torch.no_grad(),
        torch.random.fork_rng(cuda),
        torch.compiler.set_stance("force_eager"),  # for what is compiled inside
        _evaluating(inner, keep_mode),
    ):
        inner.forward(*args, **kwargs)


def _cast_inputs(module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in the dtype to which FSDP2's hook would cast them (`_pre_forward` of its state)."""
    policy = module._get_fsdp_state()._mp_policy
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))


def _uncompiled(module: nn.Module) -> Any:
    return module._modules.get("_orig_mod") or module


@contextmanager
def _evaluating(module: nn.Module, keep_mode: Collection[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the `with`; after it, modes and buffers are what they were."""
    kept = {id(part) for part in keep_mode}
    modes = [(part, part.training) for part in module.modules() if id(part) not in kept]
    buffers = [(part, name, held) for part in module.modules() for name, held in part._buffers.items()]
    copies = [(held, held._version, held.clone()) for _, _, held in buffers if held is not None]
    try:
        for part, _ in modes:
            part.training = False  # not `eval()`, which a module may have made its own
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, name, held in buffers:
            part._buffers[name] = held
        for held, version, copy in copies:
            if held._version != version:
                held.copy_(copy)
