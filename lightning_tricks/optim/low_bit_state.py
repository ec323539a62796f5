"""State that torchao's optimizers keep in 8 or 4 bits or in fp8, and its way through a checkpoint.

It is a tensor made of codes and of a scale for each block of values. Checkpoints may hold the plain values instead,
which torch would load as they are: training would go on with fp32 state, of four times the memory.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._tensors import local, sharded_like
from lightning_tricks.optim.follow_recipe import parts_of

LOW_BIT = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}  # the averages, and whether they have a sign


def is_low_bit(tensor: Tensor) -> bool:
    """Whether a state, or this rank's shard of it, is made of codes and scales."""
    return type(local(tensor)).__module__.startswith("torchao.optim.")


def plain_values(state: Tensor) -> Tensor:
    """A low-bit state in fp32, sharded as it was; any other tensor as it is."""
    if not is_low_bit(state):
        return state
    return sharded_like(state, local(state).dequantize())


def owners_of(optimizer: Optimizer) -> dict[Tensor, Any]:
    """The optimizer of each parameter that one of torchao's has, with `block_size`, the values that share a scale."""
    return {
        parameter: part
        for part in parts_of(optimizer)
        if hasattr(part, "_new_buffer")
        for group in part.param_groups
        for parameter in group["params"]
    }


def empty_state(owner: Any, parameter: Tensor, name: str) -> Tensor | None:
    """The low-bit state that an optimizer of `owners_of` makes for a parameter or shard, with zeros in it.

    None where it makes a plain one: the parameter is small, or the name is none of its averages.
    """
    if name not in LOW_BIT:
        return None
    state: Tensor = owner._new_buffer(parameter, LOW_BIT[name])
    # built again, as torchao's DTensor of bf16 weights has another dtype than what it holds
    return sharded_like(state, local(state)) if is_low_bit(state) else None


def keep_low_bit(optimizer: Optimizer) -> Optimizer:
    """Have every later `optimizer.load_state_dict` make state low-bit where it is to be. Returns the optimizer."""
    if owners_of(optimizer):
        optimizer.register_load_state_dict_pre_hook(as_kept)
    return optimizer


def as_kept(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict for an optimizer, by number, with low-bit state in place of plain values where that one keeps such.

    Values that were low-bit before come back within a step of their codes, not to the bit: the scale of a block is
    found anew from its largest value, which the codes may have rounded.
    """
    owners = owners_of(optimizer)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    for number, parameter in zip(numbers, own, strict=False):  # torch tells where the numbers differ
        if number in state and parameter in owners:
            state[number] = _entry_as_kept(state[number], parameter, owners[parameter])
    return {**state_dict, "state": state}


def _entry_as_kept(entry: Mapping[str, Any], parameter: Tensor, owner: Any) -> dict[str, Any]:
    kept = dict(entry)
    for name in entry.keys() & LOW_BIT.keys():
        saved, new = entry[name], empty_state(owner, parameter, name)
        if new is not None and not is_low_bit(saved) and local(saved).shape == local(new).shape:
            local(new).copy_(local(saved))
            kept[name] = new
    return kept
