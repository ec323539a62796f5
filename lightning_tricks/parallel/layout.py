"""The layout of a run as a table: the mesh, what a rank holds, and what it sends in a step over which axis."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_tricks._core.tensors import local
from lightning_tricks.parallel.activation_checkpointing import mode_of
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import Parallelized, ParallelOptions
from lightning_tricks.parallel.shard import local_bytes
from lightning_tricks.parallel.tensor import activations_sent


def layout_table(dims: ParallelDims, made: Parallelized, options: ParallelOptions, module: nn.Module) -> str:
    """The lines that tell how `module` was divided, as rank 0 sees it.

    Args:
        dims: sizes of the mesh.
        made: what `parallelize` returned.
        options: that it was given.
        module: after it.
    """
    names, scalars = list(made.blocks), [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    few = names if len(names) < 3 else [names[0], "...", names[-1]]
    share = made.gathered / max(made.elements, 1)
    rows = [
        ("blocks", f"{len(names):,}: {', '.join(few)}" if names else "none"),
        ("parameters", f"{made.elements:,}, of which at most {share:.1%} are gathered at a time"),
        ("a rank has", f"{_mib(local_bytes(module))} of weights; {_data(dims)}"),
    ]
    if scalars:
        rows.append(("scalars", f"{len(scalars):,}, whole on every rank: {', '.join(scalars[:3])}"))
    if dims.tensor > 1:
        rows_too = ", and the rows between them" if made.sequence_parallel else ""
        rows.append(("tensor", f"{len(made.plan)} entries of the plan divide matrices{rows_too}"))
    if dims.context > 1:
        rows.append(("context", f"each rank has 1/{dims.context} of each row; {options.context_method}"))
    rows += [("sends", line) for line in sent(dims, made.plan, options, module)]
    return "\n".join([f"FSDP2 on {dims}", *(f"  {name:<11} {text}" for name, text in rows)])


def _data(dims: ParallelDims) -> str:
    """Which ranks have the rows of rank 0."""
    same = dims.context * dims.tensor
    rows = f"rows of {dims.data_ranks:,} data ranks"
    return rows + (f", {same} processes each" if same > 1 else "")


@dataclass(frozen=True)
class Traffic:
    """What the ranks of one axis send to each other.

    Attributes:
        axis: of the mesh: `shard`, `replicate`, `tensor` or `context`.
        ranks: number of processes of a group.
        gathered: bytes of the whole tensors that are gathered in a micro-batch, each time counted.
        reduced: bytes of those that are reduced.
        per_token: bytes that are gathered or reduced for each token of a micro-batch, forward and backward.
    """

    axis: str
    ranks: int
    gathered: int = 0
    reduced: int = 0
    per_token: float = 0.0

    def bytes(self, tokens: int) -> float:
        """Bytes that a rank gets from the others in a micro-batch of so many tokens of its own."""
        return (self.gathered + self.reduced + self.per_token * tokens) * (self.ranks - 1) / self.ranks


def traffic(dims: ParallelDims, plan: Mapping[str, str], options: ParallelOptions, module: nn.Module) -> list[Traffic]:
    """What a rank gathers and reduces in each micro-batch, for each axis.

    Bytes are those of the whole parts that a collective makes or takes, of which (n - 1) / n come from n - 1 others.
    Those of context ranks come from modules with a method `sent_between_context_ranks`; 0 where none has.
    Blocks that run again in the backward pass send theirs again.

    Args:
        dims: sizes of the mesh.
        plan: over the tensor ranks.
        options: of `parallelize`.
        module: after it.
    """
    bytes_of = _gathered_bytes(dims, options.policy, module)
    size = (options.policy.param_dtype or next(module.parameters()).dtype).itemsize  # of an activation's element
    shards = dims.shard * dims.context
    found = []
    if shards > 1:
        times = 2 if options.reshard_after_forward else 1
        found.append(Traffic("shard", shards, times * bytes_of["gather"], bytes_of["reduce"]))
    if dims.replicate > 1:
        # a ring sends a part of the sum twice: on its way to one rank, and from there to all
        found.append(Traffic("replicate", dims.replicate, bytes_of["reduce"] // shards, bytes_of["reduce"] // shards))
    if dims.tensor > 1:
        found.append(Traffic("tensor", dims.tensor, per_token=activations_sent(module, plan) * size))
    if dims.context > 1:
        found.append(Traffic("context", dims.context, per_token=_between_parts(dims, options, module) * size))
    return found


def _between_parts(dims: ParallelDims, options: ParallelOptions, module: nn.Module) -> int:
    """Elements that context ranks send for a token of theirs, forward and backward."""
    again = {part for block in module.modules() if mode_of(block) != "none" for part in block.modules()}
    total = 0
    for part in module.modules():
        if callable(sent := getattr(part, "sent_between_context_ranks", None)):
            total += (3 if part in again else 2) * sent(options.context_method, dims.context, dims.tensor)
    return total


def sent(dims: ParallelDims, plan: Mapping[str, str], options: ParallelOptions, module: nn.Module) -> list[str]:
    """`traffic` in words, a line for each axis."""
    lines = []
    for one in traffic(dims, plan, options, module):
        if one.axis == "shard":
            times = 2 if options.reshard_after_forward else 1
            lines.append(
                f"over {one.ranks} shards a micro-batch: gathers {times} x {_mib(one.gathered // times)} of weights, "
                f"reduces {_mib(one.reduced)} of gradients"
            )
        elif one.axis == "replicate":
            lines.append(f"over {one.ranks} replicas: reduces {_mib(one.reduced)} of gradients")
        elif one.axis == "tensor":
            size = f"{one.per_token / 2**10:,.2f} KiB"
            lines.append(f"over {one.ranks} tensor ranks a token: {size} of activations and their gradients")
        else:
            what = {"gather": "keys and values of each row", "ulysses": "queries, keys, values and outputs of each row"}
            size = f"{one.per_token / 2**10:,.2f} KiB a token, " if one.per_token else ""
            lines.append(f"over {one.ranks} context ranks: {size}{what[options.context_method]}, and their gradients")
    return lines


def _gathered_bytes(dims: ParallelDims, policy: MixedPrecisionPolicy, module: nn.Module) -> Mapping[str, int]:
    """Bytes of all parameters that one model replica's shards make, on this rank's part of the matrices."""
    found = {"gather": 0, "reduce": 0}
    for parameter in module.parameters():
        if parameter.ndim == 0:
            continue
        shard = local(parameter)
        elements = shard.numel() * dims.shard * dims.context
        gathered = torch.float8_e4m3fn if hasattr(shard, "fsdp_pre_all_gather") else policy.param_dtype
        for kind, dtype in (("gather", gathered), ("reduce", policy.reduce_dtype or policy.param_dtype)):
            found[kind] += elements * (dtype or parameter.dtype).itemsize
    return found


def _mib(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 10 * 2**30 else (2**20, "MiB")
    return f"{size / unit:,.2f} {name}"
