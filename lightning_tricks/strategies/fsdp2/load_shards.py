"""Load any checkpoint into a sharded module and its optimizers: shards of any number of processes, or whole tensors."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_tricks._errors import UsageError
from lightning_tricks._find_modules import clean_name
from lightning_tricks.checkpoints import check_checkpoint
from lightning_tricks.checkpoints.optimizer_names import by_place, check_same_groups, group_names, parameter_names
from lightning_tricks.checkpoints.read_folder import Path_, read_by_name


def check_together(path: Any) -> Path:
    """`check_checkpoint` on every rank, so that none goes on to wait for one that cannot; every rank must call.

    Raises:
        UsageError: on all ranks, what the first of those says that cannot open it.
    """
    problem = None
    try:
        check_checkpoint(path)
    except UsageError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if not any(problems):
        return Path(path)
    rank, first = next((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
    raise UsageError(first if all(problems) else f"{first} (on rank {rank}: a checkpoint lies where all ranks see it)")


def read_shards(folder: Path, module: nn.Module, optimizers: bool, weights_only: bool | None) -> dict[str, Any]:
    """A folder as a Lightning checkpoint, with DTensors where this rank has shards; optimizer state is by name.

    No process holds a whole tensor of those that are sharded.
    """
    weights = {clean_name(name): value for name, value in module.state_dict(keep_vars=True).items()}
    parameters = {name: parameter for parameter, name in parameter_names(module).items()}

    def room(path: Path_, size: torch.Size, dtype: torch.dtype) -> Tensor:
        # .../state/NAME/exp_avg is that of a parameter; what has another shape, such as `step`, is not sharded
        if path[0] in ("state_dict", "model"):
            like = weights.get(clean_name(str(path[1])))
        else:
            like = parameters.get(str(path[2])) if path[1] == "state" else None
        if isinstance(like, DTensor) and like.shape == size:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype)

    return read_by_name(folder, weights_only, room, optimizers)


def as_shards(value: Any, like: Tensor | None) -> Any:
    """This rank's part of a whole tensor that has the shape of a sharded one; anything else as it is.

    A copy, as the whole may be a file that is mapped to memory.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not isinstance(like, DTensor) or like.shape != value.shape:
        return value.clone()
    # every rank has read the same tensor, so there is nothing to send
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


def load_weights(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors or shards into a sharded module; names may have the prefixes of wrappers or not.

    Raises:
        UsageError: naming the first weight that is missing, not known here (both only where `strict`), or of another
            shape.
    """
    own = module.state_dict(keep_vars=True)
    name_here = {clean_name(name): name for name in own}
    renamed = {name_here.get(clean_name(name), name): value for name, value in state_dict.items()}
    where = "make the model the one that was saved"
    if strict:
        for name in (name for name in own if name not in renamed):
            raise UsageError(f"the checkpoint has no '{name}': {where}, or set strict_loading of the module to False")
        for name in (name for name in renamed if name not in own):
            raise UsageError(f"the model has no '{name}', which the checkpoint has: {where}")
    for name, value in renamed.items():
        here = own.get(name)
        if isinstance(here, Tensor) and isinstance(value, Tensor) and here.shape != value.shape:
            raise UsageError(
                f"'{name}' is {tuple(value.shape)} in the checkpoint and {tuple(here.shape)} here: {where}"
            )
    module.load_state_dict({name: as_shards(value, own.get(name)) for name, value in renamed.items()}, strict=strict)


def load_optimizers(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Load whole tensors by place, or shards by name, into optimizers of sharded parameters.

    Raises:
        UsageError: another number of optimizers than was saved; by name, parameters in other groups or another order.
    """
    if len(optimizers) != len(saved):
        raise UsageError(
            f"the checkpoint has the state of {len(saved)} optimizers where there are {len(optimizers)} here: "
            "make the module the one that was saved, or load the weights only"
        )
    for optimizer, state_dict in zip(optimizers, saved, strict=True):
        groups = state_dict["param_groups"]
        if any(isinstance(name, str) for group in groups for name in group["params"]):
            check_same_groups(groups, group_names(module, optimizer))
            state_dict = by_place(state_dict)
        _load_by_place(optimizer, state_dict)


def _load_by_place(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    like = dict(zip(places, own, strict=False))  # torch says where the numbers differ
    state = {
        place: tree_map(partial(as_shards, like=like.get(place)), entry) for place, entry in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})
