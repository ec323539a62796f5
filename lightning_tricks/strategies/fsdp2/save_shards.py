"""Save a sharded module and its optimizers: a folder of shards, or all of it on rank 0."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_tricks.checkpoints.check_checkpoint import REST
from lightning_tricks.checkpoints.optimizer_names import by_name, group_names
from lightning_tricks.checkpoints.swap_in import clear_place, fsync_path, place_of, put_in_place, remove


def gather(tree: Any, keep: bool) -> Any:
    """Each DTensor of a nested state whole, on the host; every rank must call.

    Args:
        tree: nested dicts, lists and tuples.
        keep: whether this rank wants it; others get None in the place of every tensor.
    """

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu() if keep else None

    return tree_map(whole, tree)


def shards_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict with names in the place of numbers, for folders."""
    return by_name(optimizer.state_dict(), [name for group in group_names(module, optimizer) for name in group])


def save_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a Lightning checkpoint as a folder, each rank its shards; every rank must call.

    What is not sharded is rank 0's. The folder gets its name when all of it is on the disk, `.metadata` last.

    Args:
        checkpoint: with shards and optimizer state by name; loses both.
        path: the folder, there or not; equal on all ranks.
    """
    shards = {"state_dict": checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    shards |= {f"optimizer_{number}": state for number, state in enumerate(states)}
    if dist.get_rank() != 0:
        shards = _only_shards(shards)
    try:
        on_rank_0(lambda: _begin(checkpoint, path))
        dcp.save(shards, checkpoint_id=place_of(path))
        on_rank_0(lambda: put_in_place(path))
    except Exception:
        if dist.get_rank() == 0:
            remove(place_of(path))  # a full disk is not to stay full
        raise


def _begin(rest: dict[str, Any], path: Path) -> None:
    folder = clear_place(path)
    folder.mkdir()
    torch.save(rest, folder / REST)
    fsync_path(folder / REST)


def _only_shards(tree: Any) -> Any:
    """The part of a nested dict that is DTensors."""
    if not isinstance(tree, dict):
        return tree
    return {key: _only_shards(value) for key, value in tree.items() if isinstance(value, DTensor | dict)}


def on_rank_0(act: Callable[[], None]) -> None:
    """Have rank 0 do something while the others wait; where it fails, it fails on all of them.

    Raises:
        OSError: on the other ranks, with the text of rank 0's error, which is raised there as it is.
    """
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            act()
        except Exception as failed:
            error = failed
    message = [None if error is None else f"{type(error).__name__} on rank 0: {error}"]
    dist.broadcast_object_list(message, src=0)
    if error is not None:
        raise error
    if message[0] is not None:
        raise OSError(message[0])
