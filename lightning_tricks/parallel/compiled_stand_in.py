"""What a compiled block keeps for its backward pass, without compiling it: torch's own partitioner decides.

`torch.compile` partitions the joint graph of forward and backward pass, so that as little as possible is kept. The
same partition is made here on tensors without data, and both halves run operation by operation. Elementwise results
that only fused kernels read stay in registers there, and are not recorded.
"""

import importlib
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Interpreter
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from lightning_tricks._activation_checkpointing import ATTENTION_OPS, LINEAR_OPS, Mode, keeps_linear, mode_of
from lightning_tricks._replaced import replaced
from lightning_tricks._tensors import local, sharded_like

_aten = torch.ops.aten
# Of an elementwise result; one that more operations read is written to memory. With this number the largest instants
# are those that benchmarks/plan_memory.py has measured, within 5 %.
_MOST_READERS = 2
_REDUCTIONS = {_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.var_mean.correction, _aten.sum.default}


def load_partitioner() -> None:
    """Import what the partition takes, in a process whose forks will each trace; they would all import it."""
    for name in ("functorch.compile", "torch._inductor.decomposition", "torch._inductor.pattern_matcher"):
        importlib.import_module(name)


@contextmanager
def stand_in_for_compiled(
    blocks: Iterable[nn.Module], unrecorded: Callable[[], AbstractContextManager[Any]]
) -> Iterator[list[str]]:
    """Have the blocks keep what their compiled forms keep; the list gets a note where one cannot be.

    Args:
        blocks: their arguments are tensors, or values that can be written as text.
        unrecorded: around the tracing of a graph, whose tensors are none of the step.
    """
    notes: list[str] = []
    graphs: dict[Any, Any] = {}
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(block, "forward", _forward(block, block.forward, graphs, notes, unrecorded)))
        yield notes


def _forward(
    block: nn.Module, eager: Callable[..., Any], graphs: dict[Any, Any], notes: list[str], unrecorded: Callable[[], Any]
) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        names, parameters = zip(*block.named_parameters(), strict=True)
        values, form = tree_flatten((args, kwargs))
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        tensors = [values[place] for place in places]
        fixed = [None if isinstance(value, Tensor) else value for value in values]
        if not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        if mode_of(block) == "full" and any(isinstance(tensor, DTensor) for tensor in (*parameters, *tensors)):
            # with nothing but the block's input kept, torch 2.13 keeps the mesh of its weights as a tensor, and fails
            notes.append("blocks that tensor ranks share and that run again are counted as not compiled there")
            return eager(*args, **kwargs)

        def call(*flat: Tensor) -> Any:
            found = list(fixed)
            for place, tensor in zip(places, flat, strict=False):
                found[place] = tensor
            own, named = tree_unflatten(found, form)
            weights = dict(zip(names, flat[len(places) :], strict=True))
            with torch.nn.utils.stateless._reparametrize_module(block, weights), _not_checkpointed(block):
                return _plain(block, eager)(*own, **named)

        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in (*tensors, *parameters))
        key = (type(block), mode_of(block), shapes, str(fixed))
        if key not in graphs:
            linears = sum(isinstance(part, nn.Linear) for part in block.modules())
            graphs[key] = _partitioned(call, mode_of(block), linears, unrecorded)
            with unrecorded():
                graphs[key](*(_like(tensor).requires_grad_(tensor.requires_grad) for tensor in (*tensors, *parameters)))
        return graphs[key](*tensors, *parameters)

    return forward


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same class and sizes, in memory of its own."""
    if isinstance(tensor, DTensor):
        return sharded_like(tensor, _like(local(tensor)))
    if not hasattr(tensor, "__tensor_flatten__"):
        return torch.empty_like(tensor)
    names, context = tensor.__tensor_flatten__()  # such as a weight in fp8, which knows few operations
    parts = {name: _like(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]


def _plain(block: nn.Module, eager: Callable[..., Any]) -> Callable[..., Any]:
    return vars(block).get("plain_forward", eager)


@contextmanager
def _not_checkpointed(block: Any) -> Iterator[None]:
    if isinstance(getattr(block, "checkpointing", None), str):
        with replaced(block, "checkpointing", "none"):
            yield
    else:
        yield


def _partitioned(
    call: Callable[..., Any], mode: Mode, linears: int, unrecorded: Callable[[], Any]
) -> Callable[..., Any]:
    """`call` as two graphs, partitioned as `torch.compile` does it."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: Any, inputs: Any, **more: Any) -> Any:
        if mode != "none":
            _tag(joint, mode, linears, more["num_fwd_outputs"])
        return min_cut_rematerialization_partition(joint, inputs, **more)

    def fused(graph: Any, inputs: Any) -> Any:
        in_registers = _in_registers(graph.graph.nodes)

        def run(arguments: list[Any]) -> Any:  # a new one each time, as it holds what it has computed
            return _Fused(graph, in_registers, unrecorded).boxed_run(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compiler: Any = fused
    return aot_function(call, compiler, compiler, partition_fn=partition, decompositions=select_decomp_table())


class _Fused(Interpreter):
    """Runs a graph; `unrecorded` is around the operations whose results a fused kernel never writes to memory."""

    def __init__(self, graph: Any, in_registers: set[Any], unrecorded: Callable[[], Any]) -> None:
        super().__init__(graph)
        self.in_registers, self.unrecorded = in_registers, unrecorded

    def run_node(self, node: Any) -> Any:
        if node not in self.in_registers:
            return super().run_node(node)
        with self.unrecorded():
            result = super().run_node(node)
        result.read_by_kernel = [self.env[read] for read in node.all_input_nodes]  # which runs where the result is used
        return result


def _in_registers(nodes: Iterable[Any]) -> set[Any]:
    """The elementwise results that only fused kernels read, and their views."""
    found: set[Any] = set()
    for node in nodes:
        views_one = _is_view(node) and node.args[0] in found
        if views_one or (_is_elementwise(node) and len(node.users) <= _MOST_READERS and _only_fused(node)):
            found.add(node)
    return found


def _is_view(node: Any) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _is_elementwise(node: Any) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _only_fused(node: Any) -> bool:
    """Whether only elementwise operations and reductions read a result, directly or as a view."""
    for user in node.users:
        if user.op != "call_function":
            return False  # a result of the graph, kept for the backward pass or for the next block
        if _is_view(user) and not _only_fused(user):
            return False
        if not (_is_elementwise(user) or _is_view(user) or user.target in _REDUCTIONS):
            return False
    return True


def _tag(joint: Any, mode: Mode, linears: int, outputs: int) -> None:
    """Mark the operations of the forward pass as activation checkpointing does."""
    (output,) = [node for node in joint.graph.nodes if node.op == "output"]
    ahead, forward = list(output.args[0][:outputs]), set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in forward:
            forward.add(node)
            ahead += node.all_input_nodes
    seen = 0
    for node in joint.graph.nodes:
        if node not in forward or node.op != "call_function":
            continue
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        if node.target is operator.getitem:  # one of several results
            policy = node.args[0].meta["recompute"]
        elif mode != "full" and node.target in ATTENTION_OPS:
            policy = CheckpointPolicy.MUST_SAVE
        elif node.target in LINEAR_OPS:
            seen += 1
            if keeps_linear(mode, seen, linears):
                policy = CheckpointPolicy.MUST_SAVE
        node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0
