"""The states that SpikeRollback can go back to: copies in the host's memory, and the run's own checkpoints."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import KeepsRollbackState
from lightning_tricks._core.tensors import local, sharded_like
from lightning_tricks._trainer.objects import unwrapped
from lightning_tricks._trainer.run_facts import enabled_scaler
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.check_checkpoint import verify_checkpoint
from lightning_tricks.checkpoints.find_checkpoint import Candidate, candidates, newest_whole, restore_name
from lightning_tricks.checkpoints.open_checkpoint import open_checkpoint
from lightning_tricks.checkpoints.snapshot import HostBuffers, snapshot
from lightning_tricks.guards.step_guard import can_be_copied
from lightning_tricks.optim.keep_settings_on_load import layers_of, options_of
from lightning_tricks.parallel.shard import drop_gathered

_ALWAYS_KEPT = {"lr", "initial_lr"}
_CPU = torch.device("cpu")


class TrainingState:
    """A copy of weights, buffers, optimizer state, loss scale and averages: of sharded tensors this rank's shards.

    The schedule is left out: learning rates and all other arguments of an optimizer's constructor stay as they are when
    the copy is put back. Counts that an optimizer keeps in its groups are part of the copy. So are buffers, but not
    the random state.

    Args:
        trainer: its optimizers and its GradScaler.
        pl_module: its parameters and buffers.
        buffers: page-locked memory for copies from a GPU; None for ordinary memory.
    """

    def __init__(self, trainer: Any, pl_module: Any, buffers: HostBuffers | None = None) -> None:
        scaler = enabled_scaler(trainer.precision_plugin)
        live = {
            "module": _tensors(pl_module),
            "optimizers": [
                [_state(layer) for layer in layers_of(unwrapped(optimizer))] for optimizer in trainer.optimizers
            ],
            "scaler": {} if scaler is None else scaler.state_dict(),
            "callbacks": {
                callback.state_key: callback.rollback_state()
                for callback in trainer.callbacks
                if isinstance(callback, KeepsRollbackState)
            },
        }
        here = tree_map(lambda value: local(value).detach() if isinstance(value, Tensor) else value, live)
        self._copy = snapshot(here, buffers)

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
        for callback in trainer.callbacks:
            if callback.state_key in self._copy["callbacks"]:
                callback.load_rollback_state(self._copy["callbacks"][callback.state_key])


@dataclass(frozen=True)
class Snapshot:
    """A state, and where the run stood.

    Args:
        step: the next one, `trainer.global_step`.
        sample: position of its first sample; None for data without positions.
        detector: state of the SpikeDetector.
        state: weights and optimizer.
        buffers: page-locked memory of the state; None on a CPU.
    """

    step: int
    sample: int | None
    detector: dict[str, Any]
    state: TrainingState
    buffers: HostBuffers | None


class SnapshotRing:
    """At most `size` snapshots; a new one takes the memory of the oldest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._snapshots: list[Snapshot] = []  # the oldest first
        self._free: list[HostBuffers] = []

    def take(self, trainer: Any, pl_module: Any, sample: int | None, detector: dict[str, Any]) -> None:
        """Copy the present state, unless the size is 0."""
        if self.size == 0:
            return
        if len(self._snapshots) == self.size:
            oldest = self._snapshots[0]
            self.keep(lambda taken: taken is not oldest)
        buffers = None
        if trainer.strategy.root_device.type == "cuda":
            buffers = self._free.pop() if self._free else HostBuffers()
        state = TrainingState(trainer, pl_module, buffers)
        self._snapshots.append(Snapshot(trainer.global_step, sample, detector, state, buffers))

    def newest(self, is_good: Callable[[int], bool]) -> Snapshot | None:
        """The newest snapshot of a good step."""
        return next((taken for taken in reversed(self._snapshots) if is_good(taken.step)), None)

    def keep(self, wanted: Callable[[Snapshot], bool]) -> None:
        """Drop the other snapshots; later ones take their memory."""
        dropped = [taken.buffers for taken in self._snapshots if not wanted(taken)]
        self._free += [buffers for buffers in dropped if buffers is not None]
        self._snapshots = [taken for taken in self._snapshots if wanted(taken)]


def _tensors(pl_module: Any) -> dict[str, Tensor]:
    drop_gathered(pl_module)
    tensors = {name: tensor for name, tensor in pl_module.named_parameters() if not is_lazy(tensor)}  # has no values
    return {**tensors, **{name: tensor for name, tensor in pl_module.named_buffers() if can_be_copied(tensor)}}


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group, the settings that the recipe and the schedule own: not the optimizer's state."""
    names = _ALWAYS_KEPT | options_of(layers_of(optimizer))
    return [{name: value for name, value in group.items() if name in names} for group in optimizer.param_groups]


def _state(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, that of parameters by their place in the groups, and the counts in its groups."""
    of_parameters = [optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer)]
    groups = zip(optimizer.param_groups, _settings(optimizer), strict=True)
    return {
        "parameters": [dict(state) for state in of_parameters],
        "sharded": [
            [key for key, value in state.items() if isinstance(value, Tensor) and local(value) is not value]
            for state in of_parameters
        ],
        "others": {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
        "groups": [
            {name: value for name, value in group.items() if name not in {*own, "params"}} for group, own in groups
        ],
    }


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _restore_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    # parameters that a finetuning has added since then, in groups behind the others, have had no step either
    every: Any = zip_longest(_parameters(optimizer), saved["parameters"], saved["sharded"], fillvalue={})
    for parameter, values, sharded in every:
        if values:
            state = optimizer.state[parameter]
            _restore_entries(state, values, parameter.device)
            for key in sharded:  # one that the state did not have any more came back as this rank's shard alone
                if local(state[key]) is state[key]:
                    state[key] = sharded_like(parameter, state[key])
        else:
            optimizer.state.pop(parameter, None)  # it had had no step
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    _restore_entries(others, saved["others"], _CPU)
    optimizer.state.update(others)
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update({name: _into(group.get(name), value, _CPU) for name, value in values.items()})


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


# ---- on the disk


def folders_of(trainer: Any) -> list[Path]:
    """The folders on a file system to which a Trainer's callbacks save."""
    given = [str(saver.dirpath) for saver in trainer.checkpoint_callbacks if getattr(saver, "dirpath", None)]
    return [Path(folder) for folder in dict.fromkeys(given) if "://" not in folder]


class SavedStates:
    """The checkpoints of a run that lie in the folders of its Trainer's callbacks.

    One that was there before the fit began counts only up to the step with which the fit goes on: later ones are of
    another run, or of a future that this run has left.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._goes_on_from = trainer.global_step if trainer.ckpt_path or trainer.global_step else -1
        found = [candidate for folder in folders_of(trainer) for candidate in candidates(folder)]
        self._older = {(candidate.place, candidate.written_ns) for candidate in found}

    def restore_newest(self, is_good: Callable[[int], bool]) -> tuple[Path, dict[str, Any]] | None:
        """Load weights and optimizer state of the newest whole checkpoint; every rank must call.

        Args:
            is_good: whether the state before a step may be gone back to: the loss that it gave was finite.

        Returns:
            Its path and its content; None where there is none.
        """
        trainer = self._trainer
        if isinstance(io := trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            io.wait()  # what a thread still writes
        path = trainer.strategy.broadcast(self._find(is_good) if trainer.is_global_zero else None)
        return None if path is None else (path, _load(trainer, path))

    def _find(self, is_good: Callable[[int], bool]) -> Path | None:
        def check(place: Path) -> None:
            candidate = by_place.get(place)
            if candidate is None:
                raise UsageError("new")
            step = _step_of(candidate)
            is_older = (place, candidate.written_ns) in self._older
            if not is_good(step) or (is_older and step > self._goes_on_from):
                raise UsageError("of another time")
            verify_checkpoint(place, resumes=True)

        folders = folders_of(self._trainer)
        by_place = {candidate.place: candidate for folder in folders for candidate in candidates(folder)}
        chosen = newest_whole(folders, check).chosen
        return None if chosen is None else restore_name(chosen)


def _step_of(candidate: Candidate) -> int:
    """`trainer.global_step` at which a checkpoint was written; read from its content where it has no record."""
    if candidate.record is not None:
        return candidate.record.step
    return int(open_checkpoint(candidate.place, parts=(), verify=False)["global_step"])


@torch.no_grad()
def _load(trainer: Any, path: Path) -> dict[str, Any]:
    """Load weights, optimizer state and loss scale as a resume does; the schedule and all counters stay."""
    strategy, module, plugin = trainer.strategy, trainer.lightning_module, trainer.precision_plugin
    optimizers = [unwrapped(optimizer) for optimizer in trainer.optimizers]
    kept = [_settings(optimizer) for optimizer in optimizers]
    drop_gathered(module)
    checkpoint: dict[str, Any] = strategy.load_checkpoint(path)
    module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    if strategy.lightning_restore_optimizer:
        strategy.load_optimizer_state_dict(checkpoint)
    for optimizer, groups in zip(optimizers, kept, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
    plugin.on_load_checkpoint(checkpoint)
    scaler, state = enabled_scaler(plugin), checkpoint.get(type(plugin).__qualname__) or {}
    if scaler is not None and "scale" in state:  # what a plugin counts, such as BF16Step's steps, goes on
        scaler.load_state_dict({**scaler.state_dict(), **{name: state[name] for name in ("scale", "_growth_tracker")}})
    for callback in trainer.callbacks:
        if hasattr(callback, "load_rollback_checkpoint"):
            callback.load_rollback_checkpoint(checkpoint)
    return checkpoint
