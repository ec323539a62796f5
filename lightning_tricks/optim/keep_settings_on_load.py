"""Make an optimizer's resume safe: state goes to the right parameters, and the recipe's settings beat the checkpoint's.

torch restores state by position and takes lr, betas and weight decay from the checkpoint; both are silent.
"""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any

import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim.composed_optimizer import ComposedOptimizer

# keys of a group that decay_groups, build_optimizer and schedules set
_OURS = {"lr", "weight_decay", "lr_scale", "name", "param_names", "roles", "layouts", "optimizer", "rule"}


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a ComposedOptimizer; for any other optimizer, a list of itself."""
    return list(optimizer.optimizers.values()) if isinstance(optimizer, ComposedOptimizer) else [optimizer]


def layers_of(optimizer: Any) -> list[Any]:
    """An optimizer, the one that it wraps as its attribute `optimizer`, such as Lookahead does, and so on inwards."""
    layers = [optimizer]
    while isinstance(inner := getattr(layers[-1], "optimizer", None), torch.optim.Optimizer):
        layers.append(inner)
    return layers


def keep_settings_on_load(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
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
    options = {option for part in parts_of(optimizer) for option in inspect.signature(type(part)).parameters}
    settings = (_OURS | options) - {"params"}

    def settings_of(group: dict[str, Any]) -> dict[str, Any]:
        peak = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a schedule has changed the lr itself
        return deepcopy({name: value for name, value in (group | peak).items() if name in settings})

    recipe = [settings_of(group) for group in optimizer.param_groups]

    def before_load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
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
