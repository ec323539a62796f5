"""An optimizer's state dict with parameters by name, as shards keep it, or by place, as torch's optimizers want it."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name

StateDict = dict[str, Any]


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter, without the prefixes of wrappers."""
    return {parameter: clean_name(name) for name, parameter in module.named_parameters()}


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each of an optimizer's groups.

    Raises:
        UsageError: it has a parameter that the module has not.
    """
    names = parameter_names(module)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is none of the "
                    "module's: shards are saved by name; assign it to the module, or set save_distributed_checkpoint "
                    "to False"
                )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def by_name(state_dict: Mapping[str, Any], names: Sequence[str]) -> StateDict:
    """Replace places by names.

    Args:
        state_dict: of an optimizer: `state` by place, `param_groups` whose `params` are places.
        names: of the optimizer's parameters, in the order of its groups.
    """
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    name_of = dict(zip(places, names, strict=True))
    groups = [
        {**group, "params": [name_of[place] for place in group["params"]]} for group in state_dict["param_groups"]
    ]
    state = {name_of[place]: value for place, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def by_place(state_dict: Mapping[str, Any]) -> StateDict:
    """Replace names by places, counted through the groups as `Optimizer.state_dict` does."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    place_of = {name: place for place, name in enumerate(names)}
    groups = [{**group, "params": [place_of[name] for name in group["params"]]} for group in state_dict["param_groups"]]
    state = {place_of[name]: value for name, value in state_dict.get("state", {}).items()}
    return {**state_dict, "state": state, "param_groups": groups}


def check_same_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    """Refuse names in other groups, or in another order, than they were saved in: places would be other parameters'.

    Args:
        saved: param groups by name.
        own: names of each of this optimizer's groups.

    Raises:
        UsageError: naming the first difference.
    """
    there = [(name, group) for group, entry in enumerate(saved) for name in entry["params"]]
    here = [(name, group) for group, names in enumerate(own) for name in names]
    for theirs, ours in zip_longest(there, here):
        if theirs != ours:
            raise UsageError(
                f"the checkpoint's optimizer has {_spot(theirs)} where this one has {_spot(ours)}: "
                "resume with the model and the groups that it was saved with, or load the weights only"
            )


def _spot(entry: tuple[str, int] | None) -> str:
    return "no more parameter" if entry is None else f"'{entry[0]}' in group {entry[1]}"
