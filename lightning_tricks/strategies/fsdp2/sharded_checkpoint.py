"""Checkpoints of a sharded module and its optimizers: saved as a folder, each rank its shards, and loaded from any.

A folder names the optimizer's state by parameter; a file, and torch, number it through the optimizer's groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import clean_name, names_of_others, whole_of
from lightning_tricks.checkpoints.check_checkpoint import TRAINER_STATE
from lightning_tricks.checkpoints.open_checkpoint import (
    ALL,
    AVERAGES,
    WITHOUT_OPTIMIZERS,
    KeyPath,
    by_index,
    open_checkpoint,
)
from lightning_tricks.checkpoints.record import checksum_of
from lightning_tricks.checkpoints.write_file import open_checksummed, save_with_record
from lightning_tricks.optim.keep_settings_on_load import LOW_BIT, empty_state, owners_of, plain_values, to_low_bit
from lightning_tricks.parallel.agreement import on_all_ranks
from lightning_tricks.strategies.fsdp2.stage_state import join_stages, of_stage


def gather(tree: Any, keep: bool) -> Any:
    """A nested state with whole tensors on the host, or None for each tensor unless `keep`; every rank must call."""

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = plain_values(value)  # torchao cannot gather codes and scales of shards that differ in size
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.detach().cpu() if keep else None

    return tree_map(whole, tree)


def state_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict with names of parameters in the place of their numbers, as a folder has it.

    Every rank must call. State in plain tensors that differ by rank is refused: a folder would have rank 0's only.
    """
    on_all_ranks(lambda: _refuse_local_state(module, optimizer))
    state_dict, group_names = optimizer.state_dict(), _group_names(module, optimizer)
    names = [name for group in group_names for name in group]
    state = {names[index]: value for index, value in state_dict["state"].items()}
    groups = [{**group, "params": names} for group, names in zip(state_dict["param_groups"], group_names, strict=True)]
    state_dict = {**state_dict, "state": state, "param_groups": groups}
    return state_dict if whole_of(module) is module else join_stages(module, state_dict)


def _refuse_local_state(module: nn.Module, optimizer: Optimizer) -> None:
    names: dict[Tensor, str] = {parameter: clean_name(name) for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or parameter.to_local().shape == parameter.shape:
            continue
        for key, value in state.items():
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if plain and value.numel() > 1 and value.shape == parameter.to_local().shape:
                raise UsageError(
                    f"{type(optimizer).__name__} keeps '{key}' of '{names.get(parameter)}' as a plain tensor of each "
                    "rank's own, which no checkpoint of shards can hold: make it by torch.zeros_like(parameter), which "
                    "is sharded as the parameter is"
                )


def shards_to_save(checkpoint: Mapping[str, Any], stage: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's shards of a checkpoint by key, in nested dicts, and everything else, which only rank 0 has.

    Args:
        checkpoint: of Lightning.
        stage: process group of the ranks that have the same layers; None: all. Its first rank has its whole tensors.
    """
    rest = dict(checkpoint)
    shards = {key: rest.pop(key) for key in ("state_dict", AVERAGES) if key in rest}
    shards |= {f"optimizer_{number}": state for number, state in enumerate(rest.pop("optimizer_states", []))}
    if dist.get_rank() == 0:
        return shards, rest
    return _only(Tensor if dist.get_rank(stage) == 0 else DTensor, shards), {}


def _only(kind: type[Tensor], tree: Any) -> Any:
    """The tensors of a kind in a nested dict."""
    if not isinstance(tree, dict):
        return tree
    return {key: _only(kind, value) for key, value in tree.items() if isinstance(value, kind | dict)}


def write_shards(state: tuple[dict[str, Any], dict[str, Any]], folder: Path, group: Any) -> dict[str, int]:
    """Write this rank's files, and return the CRC-32 of each by its name; see `write_folder`. Every rank must call.

    Args:
        state: of `shards_to_save`.
        folder: to write to.
        group: None: shards are on their device, and the default process group communicates. A process group of gloo:
            they are on the host already, and no device is used.
    """
    shards, trainer_state = state
    files = _Files()
    copied_ahead = 10_000_000 if group is None else 0  # bytes; torch's default, or no stream of a device
    writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=copied_ahead)
    writer.fs = files
    try:
        dcp.save(shards, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # raised on all ranks; the caller tells the others of this rank's failure
        failure = error.failures.get(dist.get_rank(group))
        if failure is None:
            return {}
        raise failure[0] from None
    if dist.get_rank(group) == 0:
        # with a record of its own, by which a folder is known to need `record.json` too
        save_with_record(trainer_state, folder / TRAINER_STATE)
        files.checksums[TRAINER_STATE] = checksum_of(folder / TRAINER_STATE)
    return files.checksums


class _Files(FileSystem):
    """The files that torch writes for this rank: all on the disk when they are closed, with their checksums."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open for writing."""
        with open_checksummed(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksum

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a file its name."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def read_shards(
    folder: Path, module: nn.Module, optimizers: Sequence[Optimizer], weights_only: bool | None
) -> dict[str, Any]:
    """A folder as a Lightning checkpoint, with DTensors where this rank has shards; optimizer state is by name.

    Low-bit state is read as its codes and scales where this rank has a shard as it was saved, and else as plain values.
    No process holds a sharded tensor whole, except low-bit state of which the new shards would cut a block.
    """
    weights = {clean_name(name): value for name, value in module.state_dict(keep_vars=True).items()}
    parameters = {clean_name(name): parameter for name, parameter in module.named_parameters()}
    owners = {parameter: owner for optimizer in optimizers for parameter, owner in owners_of(optimizer).items()}
    absent = names_of_others(module)

    def allocate(path: KeyPath, entry: TensorStorageMetadata) -> Tensor | None:
        of_optimizer = path[0] not in ("state_dict", "model", AVERAGES)
        if absent and clean_name(str(path[2] if of_optimizer and path[1] == "state" else path[-1])) in absent:
            return None  # another pipeline stage reads it
        # .../state/NAME/exp_avg belongs to a parameter; state of another shape, such as `step`, is not sharded
        owner = None
        if path[0] in ("state_dict", "model", AVERAGES):
            like = weights.get(clean_name(str(path[-1])))
        else:
            like = parameters.get(str(path[2])) if path[1] == "state" else None
            owner = owners.get(like) if like is not None and path[3] in LOW_BIT else None
        dtype = entry.properties.dtype
        if not isinstance(like, DTensor) or like.shape != entry.size:
            return torch.empty(entry.size, dtype=dtype)
        if owner is not None:
            kept = empty_state(owner, like, str(path[3]))
            if kept is not None and _is_a_chunk(like, entry):
                return kept
            if _cuts_a_block(like, entry, owner.block_size):
                return torch.empty(entry.size, dtype=dtype)
        return torch.empty_like(like, dtype=dtype, requires_grad=False)

    parts = ALL if optimizers else WITHOUT_OPTIMIZERS
    return open_checkpoint(folder, parts=parts, weights_only=weights_only, verify=False, allocate=allocate)


def _is_a_chunk(shard: DTensor, saved: TensorStorageMetadata) -> bool:
    """Whether a tensor's shard on this rank was saved by one rank as it is."""
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return any(tuple(chunk.sizes) == shape and tuple(chunk.offsets) == offset for chunk in saved.chunks)


def _cuts_a_block(shard: DTensor, saved: TensorStorageMetadata, block_size: int) -> bool:
    """Whether a shard here, or one that was saved, begins or ends within a block of values that share a scale."""
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    parts = [(shape, offset), *((tuple(chunk.sizes), tuple(chunk.offsets)) for chunk in saved.chunks)]
    if any(sizes[1:] != tuple(saved.size[1:]) for sizes, _ in parts):
        return True
    row = saved.size[1:].numel()
    return any(edge * row % block_size for sizes, offsets in parts for edge in (offsets[0], offsets[0] + sizes[0]))


def load_weights(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors or shards into a sharded module; names may have the prefixes of wrappers or not."""
    own, absent = module.state_dict(keep_vars=True), names_of_others(module)
    name_here = {clean_name(name): name for name in own}
    here = {name: value for name, value in state_dict.items() if clean_name(name) not in absent}
    renamed = {name_here.get(clean_name(name), name): value for name, value in here.items()}
    module.load_state_dict({name: _as_shards(value, own.get(name)) for name, value in renamed.items()}, strict=strict)


def load_optimizers(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Load whole tensors by number, or shards by name, into optimizers of sharded parameters."""
    if len(optimizers) != len(saved):
        raise UsageError(
            f"the checkpoint has the state of {len(saved)} optimizers where there are {len(optimizers)} here: "
            "make the module the one that was saved, or load the weights only"
        )
    for optimizer, state_dict in zip(optimizers, saved, strict=True):
        if whole_of(module) is not module:
            state_dict = of_stage(module, _group_names(module, optimizer), state_dict)
        groups = state_dict["param_groups"]
        if any(isinstance(name, str) for group in groups for name in group["params"]):
            _check_same_groups(groups, _group_names(module, optimizer))
            state_dict = by_index(state_dict)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        like = dict(zip(indices, own, strict=False))  # torch refuses groups of other sizes
        state = {
            index: tree_map(partial(_as_shards, like=like.get(index)), entry)
            for index, entry in state_dict["state"].items()
        }
        optimizer.load_state_dict(to_low_bit(optimizer, {**state_dict, "state": state}))


def _as_shards(value: Any, like: Tensor | None) -> Any:
    """A copy of this rank's part of a whole tensor that has the shape of a sharded one; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not isinstance(like, DTensor) or like.shape != value.shape:
        return value.clone()
    value = plain_values(value)  # torchao cannot split codes and scales
    # every rank has read the same tensor, so there is nothing to send
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The plain names of the parameters of each of an optimizer's groups, all of which the module must have."""
    names = {parameter: clean_name(name) for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is none of the "
                    "module's: shards are saved by name; assign it to the module, or set save_distributed_checkpoint "
                    "to False"
                )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _check_same_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    """Refuse names in other groups, or in another order, than when saved: state would go to other parameters."""
    there = [f"'{name}' in group {group}" for group, entry in enumerate(saved) for name in entry["params"]]
    here = [f"'{name}' in group {group}" for group, names in enumerate(own) for name in names]
    for theirs, ours in zip_longest(there, here, fillvalue="no more parameter"):
        if theirs != ours:
            raise UsageError(
                f"the checkpoint's optimizer has {theirs} where this one has {ours}: "
                "resume with the model and the groups that it was saved with, or load the weights only"
            )
