"""Make an optimizer's resume safe: state goes to the right parameters, and the recipe's settings beat the checkpoint's.

torch restores state by position and takes lr, betas and weight decay from the checkpoint; both are silent. The averages
of torchao's optimizers, in 8 or 4 bits or in fp8, are a tensor subclass: codes, and a scale for each block of values. A
checkpoint may hold plain fp32 values instead, which torch would load as they are: 4 times the memory from then on.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local, sharded_like
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer

# keys of a group that decay_groups, build_optimizer and schedules set
_OURS = {"lr", "weight_decay", "lr_scale", "name", "param_names", "roles", "layouts", "optimizer", "rule"}


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of a ComposedOptimizer; for any other optimizer, a list of itself."""
    return list(optimizer.optimizers.values()) if isinstance(optimizer, ComposedOptimizer) else [optimizer]


def layers_of(optimizer: Any) -> list[Any]:
    """An optimizer, the one that it wraps as its attribute `optimizer`, such as Lookahead does, and so on inwards."""
    layers = [optimizer]
    while isinstance(inner := getattr(layers[-1], "optimizer", None), Optimizer):
        layers.append(inner)
    return layers


def options_of(optimizers: Iterable[Optimizer]) -> set[str]:
    """The arguments of the constructors of optimizers, which stand in their groups."""
    return {option for one in optimizers for option in inspect.signature(type(one)).parameters} - {"params"}


def keep_settings_on_load(optimizer: Optimizer) -> Optimizer:
    """Guard every later `optimizer.load_state_dict`; without Lightning too. Returns the optimizer.

    - The names in the checkpoint (`param_names`, which groups of `decay_groups` hold and `state_dict` stores) must be
      those of this optimizer, in the same groups and order. A state dict keyed by names, as in torch's distributed
      checkpoints, has been matched by name already.
    - Each group keeps its present settings: the learning rate, the decay and all other arguments of the optimizer's
      constructor (betas, eps, fused). Counts that an optimizer keeps in its groups come from the checkpoint. A group
      that is added later keeps the settings that it has at the first load.

    Args:
        optimizer: with `param_names` in each group.

    Raises:
        UsageError: at load: naming the first difference between the checkpoint's parameters and these.
    """
    settings = _OURS | options_of(parts_of(optimizer))

    def settings_of(group: dict[str, Any]) -> dict[str, Any]:
        peak = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a schedule has changed the lr itself
        return deepcopy({name: value for name, value in (group | peak).items() if name in settings})

    recipe = [settings_of(group) for group in optimizer.param_groups]

    def before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict["param_groups"]
        _check_names(saved, optimizer.param_groups)
        recipe.extend(map(settings_of, optimizer.param_groups[len(recipe) :]))  # of add_param_group
        # before the load, not after it: torch reads `fused` and `capturable` to decide where state belongs
        groups = [{**old, **own} for old, own in zip(saved, recipe, strict=True)]
        for group in groups:
            group.pop("initial_lr", None)  # a scheduler built after the load would start from it
        return {**state_dict, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before_load)
    return optimizer


def _check_names(saved: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
    if all(isinstance(param, str) for group in saved for param in group["params"]) and len(saved) == len(own):
        return
    if any("param_names" not in group for group in saved):
        raise UsageError(
            "the checkpoint's optimizer state does not name its parameters, so its order cannot be checked: "
            "load the weights only and start with a fresh optimizer"
        )
    for (number, theirs), (own_number, ours) in zip_longest(_flat(saved), _flat(own), fillvalue=(None, None)):
        if (number, theirs) != (own_number, ours):
            raise UsageError(
                f"the checkpoint's optimizer has {_shown(theirs, number, saved)} where this model has "
                f"{_shown(ours, own_number, own)}: resume with the model, decay_embeddings and param_rules it was "
                "saved with, or load the weights only"
            )


def _flat(groups: Sequence[dict[str, Any]]) -> list[tuple[int | None, str | None]]:
    """(number of its group, name) for each parameter."""
    return [(number, name) for number, group in enumerate(groups) for name in group["param_names"]]


def _shown(name: str | None, number: int | None, groups: Sequence[dict[str, Any]]) -> str:
    return "no more parameter" if number is None else f"'{name}' (group '{groups[number].get('name', number)}')"


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
