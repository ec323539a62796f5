"""Turn a module into its parts on a mesh, in the one right order: precision, tensor, experts, context, blocks, shards.

`traffic` counts what the ranks of each axis then send, and `layout_table` tells it all in the log.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import match_modules, repeated_blocks, whole_of
from lightning_tricks._core.protocols import HasStages
from lightning_tricks._core.tensors import local
from lightning_tricks.parallel.activation_checkpointing import Mode, checkpoint_block, mode_of
from lightning_tricks.parallel.context import ContextParallel, Method
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.parallel.experts import check_experts, divide_experts, mixtures_of, shard_experts
from lightning_tricks.parallel.pipeline import Cut
from lightning_tricks.parallel.shard import largest_group, local_bytes, refuse_unshardable, shard_module
from lightning_tricks.parallel.tensor import (
    activations_sent,
    check_divisible,
    check_plan,
    divide,
    divides_sequences,
    has_named,
    named_by,
    plan_of,
)


@dataclass(frozen=True)
class ParallelOptions:
    """How `parallelize` treats a module; the defaults change as little as can be.

    Args:
        blocks: regular expressions for the whole names of the modules to gather one at a time; None finds the repeated
            blocks.
        convert: changes the layers of the module for a precision, before anything is divided; None: nothing.
        activation_checkpointing: of each block, see `checkpoint_block`.
        compile_blocks: compile each block.
        sequence_parallel: divide the rows between the matrices over the tensor ranks, where the plan says how.
        context_method: see `ContextParallel`.
        policy: types in which weights are gathered and gradients reduced.
        offload: where the shards lie between the steps.
        reshard_after_forward: drop a block's weights after its forward pass (ZeRO-3); False keeps them (ZeRO-2).
    """

    blocks: Sequence[str] | None = None
    convert: Callable[[nn.Module], Any] | None = None
    activation_checkpointing: Mode = "none"
    compile_blocks: bool = False
    sequence_parallel: bool = True
    context_method: Method = "gather"
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class Parallelized:
    """What `parallelize` has made of a module.

    Attributes:
        blocks: the modules that are gathered one at a time, by name.
        plan: over the tensor ranks, see `plan_of`; empty without them.
        sequence_parallel: whether rows are divided between the matrices.
        elements: number of elements of all parameters.
        gathered: the most elements that a rank gathers at a time.
    """

    blocks: Mapping[str, nn.Module]
    plan: Mapping[str, str]
    sequence_parallel: bool
    elements: int
    gathered: int


def check_module(module: nn.Module, dims: ParallelDims) -> None:
    """Refuse a module that cannot be divided so, before any process group is made: its plan, widths, number of experts.

    Args:
        module: with all of its parameters, on any device.
        dims: of the run.

    Raises:
        UsageError: see `parallel.tensor.named_by`, `check_divisible` and `check_experts`; no `set_context_parallel` for
            context ranks.
    """
    if dims.tensor > 1:
        check_divisible(named_by(plan_of(module), module), module, dims.tensor)
    if dims.context > 1:
        _with_context(module)
    if dims.expert > 1:
        check_experts(module, dims.expert)


def parallelize(
    module: nn.Module, mesh: Mesh, options: ParallelOptions, roots: Sequence[nn.Module] | None = None
) -> Parallelized:
    """Divide a module over a mesh, in place: every parameter but scalars becomes this rank's part of it.

    Nothing is sent, so the values must be equal on all ranks, and tensors on the meta device stay there: under torch's
    fake process group this is any rank of any number of processes. Names and classes stay.

    Args:
        module: any; for tensor ranks with a plan, see `plan_of`; for context ranks with a method `set_context_parallel`
            that takes a `ContextParallel`; for expert ranks with a part like `HasExperts`.
        mesh: its sizes and groups.
        options: see there.
        roots: the stages of a pipeline, whose shards are gathered by their own calls; None: the module alone.

    Raises:
        UsageError: a pattern that matches nothing; parameters that FSDP2 cannot train; see also `check_module`.
    """
    dims = mesh.dims
    blocks = find_blocks(module, options.blocks)
    refuse_unshardable(module, blocks)
    elements = sum(parameter.numel() for parameter in module.parameters())
    whole = whole_of(module)
    plan = plan_of(whole) if dims.tensor > 1 else {}
    sequence_parallel = options.sequence_parallel and divides_sequences(plan)
    if dims.tensor > 1:
        check_plan(whole, plan, dims.tensor, sequence_parallel)
        plan = {name: word for name, word in plan.items() if has_named(name, module)}
    in_context = _with_context(module) if dims.context > 1 else []
    if dims.expert > 1:
        check_experts(whole, dims.expert)
    # nothing is refused below, where the module changes
    if options.convert is not None:
        options.convert(module)
    if dims.tensor > 1:
        divide(module, plan, mesh.tensor, sequence_parallel)
    experts = divide_experts(module, mesh) if dims.expert > 1 else []
    ends = _ends(module)
    gathered = largest_group(module, [*blocks.values(), *ends])
    if dims.context > 1:
        context = ContextParallel(mesh.context, mesh.device_mesh.device_type, options.context_method)
        for part in in_context:
            part.set_context_parallel(context)
    for block in blocks.values():
        checkpoint_block(block, options.activation_checkpointing)
        if options.compile_blocks:
            block.compile()
    # gradients of a stage are computed in any order, of its inputs first: its weights then stay until the last one
    reshard = options.reshard_after_forward and roots is None
    for part in experts:  # before what they are inside of
        shard_experts(
            part, mesh, reversed(blocks.values()),
            mp_policy=options.policy, offload_policy=options.offload, reshard_after_forward=reshard,
        )  # fmt: skip
    for root in (module,) if roots is None else roots:
        inside = set(map(id, root.modules()))  # by identity: torchmetrics' modules equal everything
        own, own_ends = ([part for part in parts if id(part) in inside] for parts in (blocks.values(), ends))
        shard_module(root, own, mesh.weights, options.policy, options.offload, reshard, own_ends)
    return Parallelized(blocks, plan, sequence_parallel, elements, gathered)


def find_blocks(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules to gather one at a time, by name; see `ParallelOptions.blocks`."""
    return repeated_blocks(module) if patterns is None else match_modules(module, patterns, "FSDP2Strategy.blocks")


def _ends(module: nn.Module) -> list[nn.Module]:
    """Embeddings and heads of models that name the parts which they call beside their blocks; no tied ones."""
    owners = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    models = [part for part in module.modules() if isinstance(part, HasStages)]
    named = [dict(model.named_modules()).get(name) for model in models for name in model.pipeline_plan()]
    ends = [part for part in named if isinstance(part, nn.Embedding | nn.Linear)]
    return [part for part in ends if all(owners[id(parameter)] == 1 for parameter in part.parameters())]


def _with_context(module: nn.Module) -> list[Any]:
    """The outermost parts that can treat a part of each row; each may refuse by a method `check_context_parallel`."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and callable(getattr(part, "set_context_parallel", None)):
            found[name] = part
            if callable(check := getattr(part, "check_context_parallel", None)):
                check()
    if not found:
        raise UsageError(
            f"mesh.context: {type(module).__name__} cannot treat a part of each row: give it a method "
            "set_context_parallel(context), or leave mesh.context at 1"
        )
    return list(found.values())


@dataclass(frozen=True)
class Traffic:
    """What the ranks of one axis send to each other.

    Attributes:
        axis: of the mesh.
        ranks: number of processes of a group.
        gathered: bytes of the whole tensors that are gathered in a micro-batch, each time counted.
        reduced: bytes of those that are reduced.
        per_token: bytes that are gathered or reduced for each token of a micro-batch, forward and backward; ranks wait
            for them in the middle of a block, while the rest is sent beside the computation.
        line: the same in words.
    """

    axis: str
    ranks: int
    gathered: int = 0
    reduced: int = 0
    per_token: float = 0.0
    line: str = ""

    def bytes(self, tokens: int) -> float:
        """Bytes that a rank gets from the others in a micro-batch of so many tokens of its own."""
        return (self.gathered + self.reduced + self.per_token * tokens) * (self.ranks - 1) / self.ranks


def traffic(
    dims: ParallelDims, plan: Mapping[str, str], options: ParallelOptions, module: nn.Module, stages: int = 1
) -> list[Traffic]:
    """What a rank gathers and reduces in each micro-batch, for each axis.

    Bytes are those of the whole parts that a collective makes or takes, of which (n - 1) / n come from n - 1 others.
    Those of context ranks come from modules with a method `sent_between_context_ranks`; 0 where none has. Those of
    expert ranks are the rows of tokens whose experts are as likely on any of them.
    Blocks that run again in the backward pass send theirs again.

    Args:
        dims: sizes of the mesh.
        plan: over the tensor ranks.
        options: of `parallelize`.
        module: after it.
        stages: of each pipeline rank.
    """
    experts = _experts(dims, module)
    others = [parameter for parameter in module.parameters() if parameter not in experts]
    size = (options.policy.param_dtype or next(module.parameters()).dtype).itemsize  # of an activation's element
    found, part = [], 0
    for axis, parameters, what in (("shard", others, ""), ("rest", experts, " of experts")):
        ranks, _ = dims.group(axis)
        weights, gradients = _gathered_bytes(ranks, options.policy, parameters)
        part += gradients // ranks
        if ranks > 1 and parameters:
            times = 2 if options.reshard_after_forward and dims.pipeline == 1 else 1  # stages keep them within a call
            line = f"{ranks} shards{what} a micro-batch: gathers {times} x {_mib(weights)} of weights"
            line = f"{line}, reduces {_mib(gradients)} of gradients"
            found.append(Traffic(axis, ranks, times * weights, gradients, line=line))
    if dims.replicate > 1:
        # a ring sends a part of the sum twice: on its way to one rank, and from there to all
        line = f"{dims.replicate} replicas: reduces {_mib(part)} of gradients"
        found.append(Traffic("replicate", dims.replicate, part, part, line=line))
    if dims.tensor > 1:
        a_token = activations_sent(module, plan) * size
        line = f"{dims.tensor} tensor ranks a token: {_kib(a_token)} of activations and their gradients"
        found.append(Traffic("tensor", dims.tensor, per_token=a_token, line=line))
    if dims.context > 1:
        a_token = size * _sent(module, "sent_between_context_ranks", options.context_method, dims.context, dims.tensor)
        what = {"gather": "keys and values", "ulysses": "queries, keys, values and outputs"}[options.context_method]
        count = f"{_kib(a_token)} a token, " if a_token else ""
        line = f"{dims.context} context ranks: {count}{what} of each row, and their gradients"
        found.append(Traffic("context", dims.context, per_token=a_token, line=line))
    if dims.pipeline > 1:
        # a rank gets each hidden state that the one before has sent, and gradients from the one behind; not the ends
        embeddings = (part.embedding_dim for part in whole_of(module).modules() if isinstance(part, nn.Embedding))
        a_token = 2 * stages * next(embeddings, 0) * size
        line = f"{dims.pipeline} pipeline ranks a token: {_kib(a_token)} of hidden states and their gradients"
        found.append(Traffic("pipeline", dims.pipeline, per_token=a_token, line=line))
    if dims.expert > 1:
        a_token = size * _sent(module, "sent_between_expert_ranks")
        line = f"{dims.expert} expert ranks a token: {_kib(a_token)} of rows for experts, results and their gradients"
        found.append(Traffic("expert", dims.expert, per_token=a_token, line=line))
    return found


def _experts(dims: ParallelDims, module: nn.Module) -> dict[nn.Parameter, None]:
    """The parameters that are divided over expert ranks."""
    mixtures = mixtures_of(module).values() if dims.expert > 1 else ()
    return dict.fromkeys(parameter for part in mixtures for parameter in part.experts.parameters())


def _sent(module: nn.Module, method: str, *how: Any) -> int:
    """Elements that ranks send for a token of theirs, forward and backward, as the `method` of parts says."""
    again = {part for block in module.modules() if mode_of(block) != "none" for part in block.modules()}
    total = 0
    for part in module.modules():
        if callable(sent := getattr(part, method, None)):
            total += (3 if part in again else 2) * sent(*how)
    return total


def _gathered_bytes(shards: int, policy: MixedPrecisionPolicy, parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Bytes of parameters that one replica's shards gather, and reduce, on this rank's part of the matrices."""
    gathered, reduced = 0, 0
    for parameter in parameters:
        if parameter.ndim == 0:
            continue
        shard = local(parameter)
        dtype = torch.float8_e4m3fn if hasattr(shard, "fsdp_pre_all_gather") else policy.param_dtype
        gathered += shard.numel() * shards * (dtype or parameter.dtype).itemsize
        reduced += shard.numel() * shards * (policy.reduce_dtype or policy.param_dtype or parameter.dtype).itemsize
    return gathered, reduced


def layout_table(
    dims: ParallelDims, made: Parallelized, options: ParallelOptions, module: nn.Module, cut: Cut | None = None
) -> str:
    """The lines that tell how `module` was divided, as rank 0 sees it.

    Args:
        dims: sizes of the mesh.
        made: what `parallelize` returned.
        options: that it was given.
        module: after it.
        cut: the stages, with pipeline ranks.
    """
    names, scalars = list(made.blocks), [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    few = names if len(names) < 3 else [names[0], "...", names[-1]]
    share = made.gathered / max(made.elements, 1)
    same_rows = dims.world // dims.data_ranks
    rows = f"rows of {dims.data_ranks:,} data ranks" + (f", {same_rows} processes each" if same_rows > 1 else "")
    lines = [
        ("blocks", f"{len(names):,}: {', '.join(few)}" if names else "none"),
        ("parameters", f"{made.elements:,}, of which at most {share:.1%} are gathered at a time"),
        ("a rank has", f"{_mib(local_bytes(module))} of weights; {rows}"),
    ]
    if scalars:
        lines.append(("scalars", f"{len(scalars):,}, whole on every rank: {', '.join(scalars[:3])}"))
    if dims.tensor > 1:
        rows_too = ", and the rows between them" if made.sequence_parallel else ""
        lines.append(("tensor", f"{len(made.plan)} entries of the plan divide matrices{rows_too}"))
    if dims.context > 1:
        lines.append(("context", f"each rank has 1/{dims.context} of each row; {options.context_method}"))
    if cut is not None:
        counts = " ".join(str(len(own)) for own in cut.layers)
        lines.append(("stages", f"{cut.count}, of {counts} layers; rank 0 has {', '.join(map(str, cut.stages))}"))
    if dims.expert > 1:
        mixtures = len(mixtures_of(module))
        lines.append(("expert", f"each rank has 1/{dims.expert} of the experts of {mixtures:,} mixtures"))
    stages = 1 if cut is None else len(cut.stages)
    lines += [("sends", f"over {one.line}") for one in traffic(dims, made.plan, options, module, stages)]
    return "\n".join([f"FSDP2 on {dims}", *(f"  {name:<11} {text}" for name, text in lines)])


def _kib(size: float) -> str:
    return f"{size / 2**10:,.2f} KiB"


def _mib(size: float) -> str:
    unit, name = (2**30, "GiB") if size >= 10 * 2**30 else (2**20, "MiB")
    return f"{size / unit:,.2f} {name}"
