"""Weights, buffers, optimizer state and loss scale of one process: copied to host memory, and put back in place."""

import copy
import inspect
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_tricks._tensors import local, sharded_like
from lightning_tricks._trainer import unwrapped
from lightning_tricks.checkpoints.snapshot import PinnedBuffers, snapshot
from lightning_tricks.guards.averages.swap import drop_gathered
from lightning_tricks.optim.keep_settings_on_load import layers_of

_ALWAYS_KEPT = {"params", "lr", "initial_lr"}


class TrainingState:
    """A copy of what training changes: of sharded tensors this rank's shards, and nothing is gathered.

    The schedule is left out: learning rates and all other arguments of an optimizer's constructor stay as they are when
    the copy is put back. Counts that an optimizer keeps in its groups are part of the copy. So are buffers, but not
    the random state.

    Args:
        trainer: its optimizers and its GradScaler.
        pl_module: its parameters and buffers.
        buffers: page-locked memory for copies from a GPU; None for ordinary memory.

    Attributes:
        size: bytes of host memory.
    """

    def __init__(self, trainer: Any, pl_module: Any, buffers: PinnedBuffers | None = None) -> None:
        live = {
            "module": _tensors(pl_module),
            "optimizers": [
                [_state(layer) for layer in layers_of(unwrapped(optimizer))] for optimizer in trainer.optimizers
            ],
            "scaler": _scaler_state(trainer),
        }
        self._copy = snapshot(tree_map(_local, live), buffers)
        self.size = _size(self._copy)

    @torch.no_grad()
    def restore(self, trainer: Any, pl_module: Any) -> None:
        """Put the values back into the tensors that hold them now."""
        live = _tensors(pl_module)
        for name, value in self._copy["module"].items():
            if name in live and local(live[name]).shape == value.shape:  # a cache that has grown stays
                local(live[name]).copy_(value)
        for optimizer, states in zip(trainer.optimizers, self._copy["optimizers"], strict=True):
            for layer, state in zip(layers_of(unwrapped(optimizer)), states, strict=True):
                _restore_optimizer(layer, state)
        if self._copy["scaler"]:
            trainer.precision_plugin.scaler.load_state_dict(copy.deepcopy(self._copy["scaler"]))


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group, the settings that the recipe and the schedule own: not the optimizer's state."""
    options = {option for layer in layers_of(optimizer) for option in inspect.signature(type(layer)).parameters}
    names = (_ALWAYS_KEPT | options) - {"params"}
    return [{name: value for name, value in group.items() if name in names} for group in optimizer.param_groups]


def _tensors(pl_module: Any) -> dict[str, Tensor]:
    drop_gathered(pl_module)
    return {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, that of parameters by their place in the groups, and the counts in its groups."""
    parameters = _parameters(optimizer)
    kept = [{*own, "params"} for own in settings(optimizer)]
    groups = zip(optimizer.param_groups, kept, strict=True)
    return {
        "parameters": [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
        "sharded": [_sharded_entries(optimizer.state.get(parameter, {})) for parameter in parameters],
        "others": {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
        "groups": [{name: value for name, value in group.items() if name not in own} for group, own in groups],
    }


def _sharded_entries(state: dict[Any, Any]) -> list[Any]:
    """The entries of a parameter's state that are sharded as it is."""
    return [key for key, value in state.items() if isinstance(value, Tensor) and local(value) is not value]


def _restore_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    for parameter, values, sharded in zip(_parameters(optimizer), saved["parameters"], saved["sharded"], strict=True):
        if values:
            state = optimizer.state[parameter]
            _restore_entries(state, values, parameter.device)
            for key in sharded:  # one that the state did not have any more came back as this rank's shard alone
                if local(state[key]) is state[key]:
                    state[key] = sharded_like(parameter, state[key])
        else:
            optimizer.state.pop(parameter, None)  # it had had no step
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    _restore_entries(others, saved["others"], torch.device("cpu"))
    optimizer.state.update(others)
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({name: _into(group.get(name), value, torch.device("cpu")) for name, value in values.items()})


def _restore_entries(state: dict[Any, Any], saved: dict[Any, Any], device: torch.device) -> None:
    for key in [key for key in state if key not in saved]:
        del state[key]
    for key, value in saved.items():
        state[key] = _into(state.get(key), value, device)


def _into(now: Any, saved: Any, device: torch.device) -> Any:
    """The saved value, in the memory of the present one where both are tensors of one shape; else a copy."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and local(now).shape == saved.shape:
            local(now).copy_(saved)
            return now
        return saved.to(device, copy=True)
    if isinstance(saved, dict):
        old = now if isinstance(now, dict) else {}
        return type(saved)((key, _into(old.get(key), value, device)) for key, value in saved.items())
    if type(saved) in (list, tuple):
        both = zip_longest(now if isinstance(now, list | tuple) else (), saved)
        return type(saved)(_into(one, value, device) for one, value in islice(both, len(saved)))
    return copy.deepcopy(saved)


def _scaler_state(trainer: Any) -> dict[str, Any]:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {} if scaler is None else scaler.state_dict()


def _local(value: Any) -> Any:
    return local(value).detach() if isinstance(value, Tensor) else value


def _size(tree: Any) -> int:
    """Bytes of the memory in which the tensors of a tree lie, each counted once."""
    storages: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    tree_map(count, tree)
    return sum(storages.values())
