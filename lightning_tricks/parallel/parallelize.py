"""Turn a module into its parts on a mesh, in the one right order: precision, tensor, context, blocks, shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.find_modules import match_modules, repeated_blocks
from lightning_tricks.parallel.activation_checkpointing import Mode, checkpoint_block
from lightning_tricks.parallel.context import ContextParallel, Method
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.parallel.shard import largest_group, refuse_unshardable, shard_module
from lightning_tricks.parallel.tensor import check_divisible, check_plan, divide, divides_sequences, named_by, plan_of


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
    """Refuse a module that cannot be divided so, before any process group is made: its plan, heads, widths, vocabulary.

    Args:
        module: with all of its parameters, on any device.
        dims: of the run.

    Raises:
        UsageError: see `parallel.tensor.named_by` and `check_divisible`; no `set_context_parallel` for context ranks.
    """
    if dims.tensor > 1:
        check_divisible(named_by(plan_of(module), module), module, dims.tensor)
    if dims.context > 1:
        _with_context(module)


def parallelize(module: nn.Module, mesh: Mesh, options: ParallelOptions) -> Parallelized:
    """Divide a module over a mesh, in place: every parameter but scalars becomes this rank's part of it.

    Nothing is sent, so the values must be equal on all ranks, and tensors on the meta device stay there: under torch's
    fake process group this is any rank of any number of processes. Names and classes stay.

    Args:
        module: any; for tensor ranks with a plan, see `plan_of`; for context ranks with a method `set_context_parallel`
            that takes a `ContextParallel`.
        mesh: its sizes and groups.
        options: see there.

    Raises:
        UsageError: a pattern that matches nothing; parameters that FSDP2 cannot train; see also `check_module`.
    """
    dims = mesh.dims
    blocks = find_blocks(module, options.blocks)
    refuse_unshardable(module, blocks)
    elements = sum(parameter.numel() for parameter in module.parameters())
    gathered = largest_group(module, blocks.values())
    plan = plan_of(module) if dims.tensor > 1 else {}
    sequence_parallel = options.sequence_parallel and divides_sequences(plan)
    if dims.tensor > 1:
        check_plan(module, plan, dims.tensor, sequence_parallel)
    in_context = _with_context(module) if dims.context > 1 else []
    # nothing is refused below, where the module changes
    if options.convert is not None:
        options.convert(module)
    if dims.tensor > 1:
        divide(module, plan, mesh.tensor, sequence_parallel)
    if dims.context > 1:
        context = ContextParallel(mesh.context, mesh.device_mesh.device_type, options.context_method)
        for part in in_context:
            part.set_context_parallel(context)
    for block in blocks.values():
        checkpoint_block(block, options.activation_checkpointing)
        if options.compile_blocks:
            block.compile()
    shard_module(module, blocks.values(), mesh.weights, options.policy, options.offload, options.reshard_after_forward)
    return Parallelized(blocks, plan, sequence_parallel, elements, gathered)


def find_blocks(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules to gather one at a time, by name; see `ParallelOptions.blocks`."""
    return repeated_blocks(module) if patterns is None else match_modules(module, patterns, "FSDP2Strategy.blocks")


def _with_context(module: nn.Module) -> list[Any]:
    """The outermost parts that can treat a part of each row."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and callable(getattr(part, "set_context_parallel", None)):
            found[name] = part
    if not found:
        raise UsageError(
            f"mesh.context: {type(module).__name__} cannot treat a part of each row: give it a method "
            "set_context_parallel(context), or leave mesh.context at 1"
        )
    return list(found.values())
