"""A module as the compiler is to see it: its shards whole, and what of it decides its graph."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_flatten, tree_map


def whole(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A call of a method of a module in shards, on a shell of that module whose weights are whole and take no memory.

    `fully_shard` gathers the weights in a hook, which the compiler cannot trace. No code of the module is run for the
    shell, and nothing of the module refers to it. Floating-point weights and arguments become fp32, as the policy for
    mixed precision acts in a hook too; the number of FLOPs does not depend on it. Of weights that tensor ranks share,
    the shell has this rank's part, and the hooks that send what the ranks have computed.
    """
    module: Any = function.__self__  # type: ignore[attr-defined]
    parts = list(module.modules())
    gathered = {axis for part in parts if isinstance(part, FSDPModule) for axis in _gathered_axes(part)}
    shells = {id(part): object.__new__(_plain_class(part)) for part in parts}
    for part in parts:
        vars(shells[id(part)]).update(_state(part, shells, gathered))
    args, kwargs = tree_map(partial(_without_memory, gathered=gathered), (args, kwargs))
    return MethodType(function.__func__, shells[id(module)]), args, kwargs  # type: ignore[attr-defined]


def _plain_class(part: nn.Module) -> Any:
    # fully_shard makes a class of (FSDPModule, the module's own)
    return type(part).__mro__[2] if isinstance(part, FSDPModule) else type(part)


def _gathered_axes(part: FSDPModule) -> tuple[str, ...]:
    """The axes of the mesh over which FSDP2 shards or copies a module's parameters, which its hooks make whole."""
    state: Any = part._get_fsdp_state()
    group = state._fsdp_param_group
    return () if group is None else group.mesh_info.mesh.mesh_dim_names or ()


def _state(part: nn.Module, shells: dict[int, Any], gathered: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in vars(part).items():
        if name == "_modules":
            value = {key: shells[id(child)] if child is not None else None for key, child in value.items()}
        elif name == "_parameters":
            value = {key: _whole_parameter(parameter, gathered) for key, parameter in value.items()}
        elif name == "_compiled_call_impl":
            value = None
        elif name[0] == "_" and "_hooks" in name and isinstance(value, OrderedDict):
            value = OrderedDict((key, hook) for key, hook in value.items() if _sends_between_tensor_ranks(hook))
        elif isinstance(value, MethodType) and id(value.__self__) in shells:
            function: Any = value.__func__
            if function.__code__.co_qualname.startswith("register_fsdp_forward_method."):
                function = function.__wrapped__.__func__
            value = MethodType(function, shells[id(value.__self__)])
        if "composable" not in name:
            state[name] = value
    return state


def _sends_between_tensor_ranks(hook: Any) -> bool:
    packages = ("torch.distributed.tensor.", "lightning_tricks.parallel.tensor")
    return str(getattr(hook, "__module__", "")).startswith(packages)


def _whole_parameter(parameter: Any, gathered: set[str]) -> Any:
    return None if parameter is None else nn.Parameter(_without_memory(parameter, gathered), parameter.requires_grad)


def _without_memory(value: Any, gathered: set[str]) -> Any:
    """A tensor of one element, expanded to the shape of `value` over the gathered axes; any other value as it is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or isinstance(value, DTensor)):
        return value
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    element = torch.zeros((), dtype=dtype, device=value.device)
    axes = (value.device_mesh.mesh_dim_names or ()) if isinstance(value, DTensor) else ()
    kept = tuple(axis for axis in axes if axis not in gathered)
    if not isinstance(value, DTensor) or not kept:
        return element.expand(value.shape).requires_grad_(value.requires_grad)
    mesh, placements = value.device_mesh[kept], [value.placements[axes.index(axis)] for axis in kept]
    shape, _ = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    stride = torch.empty(value.shape, device="meta").stride()
    part = DTensor.from_local(
        element.expand(shape), mesh, placements, run_check=False, shape=value.shape, stride=stride
    )
    return part.requires_grad_(value.requires_grad)


class _Same:
    """An object that is equal to itself alone; kept alive, so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(function: Any, args: Any, kwargs: Any) -> Any:
    """All that decides the graph of a call of a module's method; None for a function, whose closure is not known.

    Two blocks of one class that differ in no attribute have the same fingerprint.
    """
    module = getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        return None
    leaves, structure = tree_flatten((args, kwargs))
    parts = tuple((name, type(part), _attributes(part)) for name, part in module.named_modules())
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return function.__func__, str(structure), tuple(map(_trait, leaves)), parts, modes, casts


def _attributes(part: nn.Module) -> Any:
    found: list[Any] = []
    for name, value in vars(part).items():
        if name in ("_parameters", "_buffers"):
            found.append((name, tuple((key, _trait(tensor)) for key, tensor in value.items())))
        elif isinstance(value, MethodType) and value.__self__ is part:
            cells = value.__func__.__closure__ or ()
            found.append((name, value.__func__.__code__, tuple(_trait(cell.cell_contents) for cell in cells)))
        elif name not in ("_modules", "_compiled_call_impl"):
            found.append((name, _trait(value)))
    return tuple(found)


def _trait(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.device | type | FunctionType):
        return type(value), value
    if isinstance(value, list | tuple | set):
        return type(value), tuple(map(_trait, value))
    if isinstance(value, dict):
        return type(value), tuple((_trait(key), _trait(each)) for key, each in value.items())
    return _Same(value)
