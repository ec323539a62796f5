"""Count the FLOPs of code that `torch.compile` has compiled, which hides its operators while it runs.

Each call of such code in the real step is traced once more by `torch.compile`, with the arguments of that call and a
backend that takes the graph and gives up. So the compiler follows the code, and nothing of it is run: neither operators
nor side effects. The graph holds operators only; it is run on tensors without data, which nothing else can reach.
"""

import dataclasses
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd, eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_tricks._replaced import replaced
from lightning_tricks.accounting.flop_counting.flop_counter import (
    COMPILED_BACKWARD,
    CannotCount,
    FlopCounter,
    in_words,
)
from lightning_tricks.accounting.flop_counting.whole_module import fingerprint, whole

_SETTINGS = {
    "optimize_ddp": False,  # else DDP splits the graph
    "capture_scalar_outputs": True,  # a value may be read, to be logged
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "suppress_errors": False,
}


@dataclasses.dataclass(frozen=True)
class GraphFlops:
    """FLOPs of one call of compiled code: its forward pass, its backward pass, and what the latter computes again."""

    forward: int
    backward: int
    recompute: int
    uncounted: tuple[str, ...]  # operators without a known formula


def graph_flops(function: Callable[..., Any], args: Any, kwargs: Any) -> GraphFlops:
    """The FLOPs of a call of `function`, which is not run.

    Args:
        function: what `torch.compile` was given: a function, or a method of a module.
        args: of the call, real ones; the backward pass is counted for those that require gradients, and for weights.
        kwargs: likewise.

    Raises:
        CannotCount: the compiler cannot capture the call as one graph, or its work depends on values.
    """
    # hooks of its own, as those of a checkpoint around the call would keep tensors without data
    with _without_a_trace(), _disable_current_modes(), saved_tensors_hooks(_as_it_is, _as_it_is):
        graph, inputs = _captured(function, args, kwargs)
        try:
            return _flops_of(graph, inputs)
        except CannotCount:
            raise
        except Exception as error:
            raise CannotCount(in_words(error)) from error


def _captured(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The one graph of a call, and the tensors that it would be called with."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((graph, inputs))
        raise _Captured

    def call(probe: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # never run the function itself
            raise _Captured
        return probe + 1, function(*args, **kwargs)  # a graph of at least one operator

    # the plain settings, whatever those of the run are
    with torch._dynamo.config.patch(_SETTINGS), torch.compiler.set_stance("default"):
        try:
            torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(torch.zeros(()), *args, **kwargs)
        except Exception as error:
            if not found:
                reason = f"{error}".strip().partition("\n")[0]
                raise CannotCount(f"torch.compile does not capture it as one graph: {reason}") from None
    return found[0]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Captured(Exception):  # noqa: N818  no error: the graph is known, and must not run
    pass


def _flops_of(graph: fx.GraphModule, inputs: list[Any]) -> GraphFlops:
    fake = FakeTensorMode(
        allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    if not all(isinstance(value, Tensor | DeviceMesh) for value in inputs):
        raise CannotCount("its shapes depend on the values of a tensor")
    inputs = [_without_data(value, fake) if isinstance(value, Tensor) else value for value in inputs]
    _refuse_unknown_code(graph)
    _checkpoint_for_real(graph)
    if any(isinstance(value, DTensor) for value in inputs):
        with fake:  # DTensors ask once for the shapes of results, in which nothing is computed
            _run(graph, inputs, lambda: None)
    counter = FlopCounter(graph, without_data=True)
    before = (0, 0)

    def after_forward() -> None:
        nonlocal before
        before = counter.flops

    with fake, counter:
        _run(graph, inputs, after_forward)
    backward, recompute = (after - earlier for after, earlier in zip(counter.flops, before, strict=True))
    return GraphFlops(sum(before), backward, recompute, tuple(counter.uncounted))


def _without_data(value: Tensor, fake: FakeTensorMode) -> Tensor:
    return fake.from_tensor(value, static_shapes=True).detach().requires_grad_(value.requires_grad)


def _run(graph: fx.GraphModule, inputs: list[Any], after_forward: Callable[[], None]) -> None:
    """Forward and backward pass of a graph."""
    output = graph(*inputs)
    after_forward()
    ends = [end for end in tree_leaves(output) if isinstance(end, Tensor) and end.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])


def _refuse_unknown_code(graph: fx.GraphModule) -> None:
    """Raise CannotCount if a graph calls code that the compiler has not looked into, which may do anything."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            target = part.get_submodule(node.target) if node.op == "call_module" else node.target
            own = isinstance(target, FunctionType) and target.__module__.partition(".")[0] not in ("torch", "einops")
            if node.op.startswith("call_") and (own or isinstance(target, nn.Module)):
                raise CannotCount(f"the compiler does not look into {node.target}")


def _checkpoint_for_real(graph: fx.GraphModule) -> None:
    """Let a graph compute its checkpointed parts again in the backward pass; run as it is, it would keep all."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            nodes = part.graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint, sort=False
            )
            for node in nodes:
                node.target = _checkpointed
            part.recompile()


def _checkpointed(part: fx.GraphModule, *inputs: Any, **_: Any) -> Any:
    context = part.meta.get("_checkpoint_context_fn")
    options = {"context_fn": context} if context else {}
    return checkpoint(
        part, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **options
    )  # fmt: skip


@contextmanager
def _without_a_trace() -> Iterator[None]:
    """Put all random states back; silence warnings and logs, which the real call gives as well."""
    states, level = (random.getstate(), np.random.get_state()), logging.root.manager.disable
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _attributes_kept(tensors: list[Tensor]) -> Iterator[None]:
    """Put back the attributes of tensors: the compiler marks weights (`_dynamo_static_input_type`)."""
    before = [dict(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, attributes in zip(tensors, before, strict=True):
            vars(tensor).clear()
            vars(tensor).update(attributes)


@contextmanager
def compiled_calls_counted(counter: FlopCounter) -> Iterator[None]:
    """Add the FLOPs of all compiled code that is called inside the `with`, while the counter counts.

    Any call of compiled code asks torch for the stance (`torch.compiler.set_stance`), and sets the frame evaluation
    before and after: `compile_wrapper` in torch/_dynamo/eval_frame.py, torch 2.11 to 2.13.
    """
    calls = CompiledCalls(counter)
    if not calls.can_see:
        counter.failure = CannotCount("this version of torch does not tell whether code is compiled")
        yield
        return
    with (
        replaced(eval_frame, "_callback_from_stance", calls.callback_from_stance),
        replaced(eval_frame, "_maybe_set_eval_frame", calls.maybe_set_eval_frame),
    ):
        yield


class CompiledCalls:
    """The calls of compiled code, by the frames of `compile_wrapper`, that a counter is told of."""

    def __init__(self, counter: FlopCounter) -> None:
        self._counter = counter
        self._stance: Any = getattr(eval_frame, "_callback_from_stance", None)
        self._set_frame: Any = getattr(eval_frame, "_maybe_set_eval_frame", None)
        self.can_see = self._stance is not None and self._set_frame is not None
        self._frame: FrameType | None = None  # of the call that runs now
        self._runs = False  # past its start
        self._handled: BaseException | None = None  # what is being handled around it
        self._traces = False
        self._flops: GraphFlops | None = None
        self._known: dict[Any, GraphFlops] = {}  # by what decides the graph
        self._nodes: set[Any] = set()  # of the backward passes that will be counted

    def callback_from_stance(self, callback: Any) -> Any:
        """Compiled code is about to run, if the answer is a callback."""
        answer = self._stance(callback)
        if callable(callback) and answer is not None and self._counter.counts and not (self._traces or self._frame):
            self._traces = True
            try:
                self._start(sys._getframe(1))
            finally:
                self._traces = False
        return answer

    def maybe_set_eval_frame(self, callback: Any) -> Any:
        """Called at the start of a compiled call, after `callback_from_stance`, and at its end."""
        answer = self._set_frame(callback)
        if self._frame is not None and sys._getframe(1) is self._frame:
            if self._runs:
                raised = sys.exc_info()[1] is not self._handled
                _at_return(self._frame, lambda result: self._end(result, raised))
            self._runs = True
        return answer

    def _start(self, frame: FrameType) -> None:
        counter, values = self._counter, frame.f_locals
        try:
            if not {"fn", "args", "kwargs"} <= set(values):  # of a dictionary, or of the proxy of Python 3.13
                raise CannotCount("this version of torch does not tell which code is compiled")
            if compiled_autograd.compiled_autograd_enabled:
                raise CannotCount("its backward pass is compiled (compiled autograd)")
            self._flops = self._flops_of(values["fn"], values["args"], values["kwargs"])
            counter.add(self._flops.forward)
            for operator in self._flops.uncounted:
                counter.uncounted.setdefault(operator, counter.running_part())
        except Exception as error:  # the call itself must not fail because it cannot be counted
            reason = error if isinstance(error, CannotCount) else in_words(error)
            counter.fail(f"{counter.running_part()} is compiled: {reason}")
            return
        self._frame, self._runs, counter.muted = frame, False, True
        self._handled = sys.exc_info()[1]

    def _flops_of(self, function: Any, args: Any, kwargs: Any) -> GraphFlops:
        module = getattr(function, "__self__", None)
        if isinstance(module, nn.Module):
            if any(hasattr(parameter, "ds_shape") for parameter in module.parameters()):
                raise CannotCount("DeepSpeed has sharded its weights")
            if any(isinstance(part, FSDPModule) for part in module.modules()):
                function, args, kwargs = whole(function, args, kwargs)
        key = fingerprint(function, args, kwargs)
        found = self._known.get(key) if key is not None else None
        if found is None:
            with _attributes_kept([*self._counter.root.parameters(), *self._counter.root.buffers()]):
                found = graph_flops(function, args, kwargs)
            if key is not None:
                self._known[key] = found
        return found

    def _end(self, result: Any, raised: bool) -> None:
        flops, self._frame, self._flops, self._handled = self._flops, None, None, None
        self._counter.muted = False
        assert flops is not None
        if raised:  # as a checkpoint does when it has computed enough
            return
        runs = [0]  # backward passes so far
        tensors = list(_tensors(result))
        if flops.backward and not any(tensor.grad_fn for tensor in tensors):
            self._counter.fail(f"{self._counter.running_part()} is compiled: the tensors of its result are not found")
        for node in _compiled_nodes(tensors):
            if node not in self._nodes:
                self._nodes.add(node)
                node.register_prehook(self._backward_watched(flops, runs))

    def _backward_watched(self, flops: GraphFlops, runs: list[int]) -> Callable[[Any], None]:
        """A hook that counts a backward pass; a call of several nodes has one backward pass in all of them."""
        times = 0

        def prehook(_: Any) -> None:
            nonlocal times
            times += 1
            if times > runs[0] and self._counter.counts:
                runs[0] = times
                self._counter.add(flops.backward, flops.recompute)

        return prehook


def _at_return(frame: FrameType, call: Callable[[Any], None]) -> None:
    """Call `call(result)` when a frame of this thread, which runs its last lines, returns.

    Not all versions of torch have the result in a local variable, so that only a profile function sees it.
    """
    earlier = sys.getprofile()

    def profile(seen: FrameType, event: str, value: Any) -> None:
        if seen is frame and event == "return":
            sys.setprofile(earlier)
            call(value)

    sys.setprofile(profile)


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a result of any type."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | FunctionType):
            yield from _tensors(list(vars(leaf).values()), depth - 1)


def _compiled_nodes(tensors: list[Tensor]) -> list[Any]:
    """The autograd nodes of compiled code that tensors come from; views of its outputs stand in between."""
    nodes, found = [tensor.grad_fn for tensor in tensors], []
    for _ in range(4):
        found += [node for node in nodes if node is not None and type(node).__name__ == COMPILED_BACKWARD]
        others = [node for node in nodes if node is not None and type(node).__name__ != COMPILED_BACKWARD]
        nodes = [node for other in others for node, _ in other.next_functions]
    return found
