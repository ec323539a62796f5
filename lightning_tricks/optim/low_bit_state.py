"""Save and load the low-bit state of torchao's optimizers: averages in 8 or 4 bits, or in fp8.

Such a state is a tensor subclass: codes, and a scale for each block of values. A checkpoint may hold plain fp32 values
instead. torch would load them as they are, and training would go on with fp32 state, which takes 4 times the memory.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._core.tensors import local, sharded_like
from lightning_tricks.optim.keep_settings_on_load import parts_of

LOW_BIT = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # averages: whether they can be negative


def is_low_bit(tensor: Tensor) -> bool:
    """Whether a state tensor, or this rank's shard of it, consists of codes and scales."""
    return type(local(tensor)).__module__.startswith("torchao.optim.")


def plain_values(state: Tensor) -> Tensor:
    """A low-bit state in fp32, sharded as it was; any other tensor as it is."""
    if not is_low_bit(state):
        return state
    return sharded_like(state, local(state).dequantize())


def owners_of(optimizer: Optimizer) -> dict[Tensor, Any]:
    """The torchao optimizer of each parameter that has one; its `block_size` is the number of values for a scale."""
    return {
        parameter: part
        for part in parts_of(optimizer)
        if hasattr(part, "_new_buffer")
        for group in part.param_groups
        for parameter in group["params"]
    }


def empty_state(owner: Any, parameter: Tensor, name: str) -> Tensor | None:
    """The low-bit state that an optimizer of `owners_of` makes for a parameter or shard, with zeros in it.

    `name` is a key of `LOW_BIT`. The result is None for a small parameter, whose state is a plain tensor.
    """
    state: Tensor = owner._new_buffer(parameter, LOW_BIT[name])
    # wrapped anew: for bf16 weights, torchao's DTensor states another dtype than its local tensor has
    return sharded_like(state, local(state)) if is_low_bit(state) else None


def keep_low_bit(optimizer: Optimizer) -> Optimizer:
    """Have every later `optimizer.load_state_dict` convert plain values to low-bit state. Returns the optimizer."""
    if owners_of(optimizer):
        optimizer.register_load_state_dict_pre_hook(to_low_bit)
    return optimizer


def to_low_bit(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict keyed by number, with plain values converted to low-bit state where `optimizer` keeps such state.

    Values that were low-bit before come back within one step of their codes, not to the bit: the scale of a block is
    computed again from its largest value, which the codes may have rounded.
    """
    owners = owners_of(optimizer)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    for number, parameter in zip(numbers, own, strict=False):  # where the lengths differ, torch says so
        if number in state and parameter in owners:
            state[number] = _entry_to_low_bit(state[number], parameter, owners[parameter])
    return {**state_dict, "state": state}


def _entry_to_low_bit(entry: Mapping[str, Any], parameter: Tensor, owner: Any) -> dict[str, Any]:
    kept = dict(entry)
    for name in entry.keys() & LOW_BIT.keys():
        saved, new = entry[name], empty_state(owner, parameter, name)
        if new is not None and not is_low_bit(saved) and local(saved).shape == local(new).shape:
            local(new).copy_(local(saved))
            kept[name] = new
    return kept
