"""An optimizer's state by name over pipeline stages: joined for a checkpoint, divided when one is opened.

A checkpoint knows no stages: its groups hold the names of the whole model, in the order of one process.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name, names_of_others, whole_of
from lightning_tricks.parallel.agreement import on_all_ranks

State = Mapping[str, Any]


def join_stages(module: nn.Module, state_dict: State) -> dict[str, Any]:
    """A stage's state by name with the groups of all stages, and what is not sharded of their state.

    Every rank must call.
    """
    plain = {name: tree_map(_on_host, _not_sharded(entry)) for name, entry in state_dict["state"].items()}
    own = [_entries(group) for group in state_dict["param_groups"]]
    found = on_all_ranks(lambda: (own, plain))
    order = {clean_name(name): place for place, (name, _) in enumerate(whole_of(module).named_parameters())}
    groups = []
    for group, *parts in zip(state_dict["param_groups"], *(entries for entries, _ in found), strict=True):
        joined = {name: entry for part in parts for name, entry in part.items()}
        groups.append(_group(group, {name: joined[name] for name in sorted(joined, key=order.__getitem__)}))
    rest = {name: entry for _, entries in found for name, entry in entries.items()}
    state = {name: {**entry, **state_dict["state"].get(name, {})} for name, entry in rest.items()}
    return {**state_dict, "state": state, "param_groups": groups}


def of_stage(module: nn.Module, group_names: Sequence[Sequence[str]], state_dict: State) -> dict[str, Any]:
    """The part of a whole model's state that this stage has, by name; every rank must call.

    Args:
        module: the stage.
        group_names: names of the parameters of each group of this stage's optimizer.
        state_dict: with names, or with numbers as a file has it.

    Raises:
        UsageError: numbers, in groups of other sizes than those of all stages.
    """
    if not any(isinstance(name, str) for group in state_dict["param_groups"] for name in group["params"]):
        state_dict = _by_name(module, group_names, state_dict)
    absent = names_of_others(module)
    groups = [
        _group(group, {name: entry for name, entry in _entries(group).items() if name not in absent})
        for group in state_dict["param_groups"]
    ]
    saved = state_dict.get("state", {})  # a folder of an optimizer without state has none
    state = {name: entry for name, entry in saved.items() if name not in absent}
    return {**state_dict, "state": state, "param_groups": groups}


def _by_name(module: nn.Module, group_names: Sequence[Sequence[str]], state_dict: State) -> State:
    empty = [{"params": list(names)} for names in group_names]
    names = [group["params"] for group in join_stages(module, {"state": {}, "param_groups": empty})["param_groups"]]
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != list(map(len, names)):
        raise UsageError(
            "the checkpoint's optimizer has other groups than this one: resume with the model and the groups that it "
            "was saved with, or load the weights only"
        )
    pairs = (zip(group["params"], own, strict=True) for group, own in zip(groups, names, strict=True))
    name_of = dict(chain.from_iterable(pairs))
    state = {name_of[number]: entry for number, entry in state_dict["state"].items()}
    return {
        **state_dict,
        "state": state,
        "param_groups": [{**group, "params": own} for group, own in zip(groups, names, strict=True)],
    }


def _lists(group: State, size: int) -> list[str]:
    """The settings of a group that have an entry for each parameter."""
    return [key for key, value in group.items() if key != "params" and isinstance(value, list) and len(value) == size]


def _entries(group: State) -> dict[str, dict[str, Any]]:
    """A group's settings of each parameter, by its name."""
    keys = _lists(group, len(group["params"]))
    return {name: {key: group[key][index] for key in keys} for index, name in enumerate(group["params"])}


def _group(group: State, entries: Mapping[str, State]) -> dict[str, Any]:
    """A group with other parameters, and their entries."""
    keys = dict.fromkeys([*_lists(group, len(group["params"])), *chain.from_iterable(entries.values())])
    return {**group, **{key: [entry[key] for entry in entries.values()] for key in keys}, "params": list(entries)}


def _not_sharded(entry: State) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not isinstance(value, DTensor)}


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
