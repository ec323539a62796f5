"""The memory of one optimizer step, traced without data: what is held at each instant, and the largest of them.

The step is the real one, on tensors without data (torch's FakeTensorMode): the module divided by `parallelize`, its
forward and backward pass, the optimizer. Allocations and releases are recorded, so no formula of the model is
needed. `fake_cluster` gives the process group.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_tricks._replaced import replaced
from lightning_tricks._tensors import local, refuse_second_derivative
from lightning_tricks.accounting.fast_bf16 import has_fast_bf16
from lightning_tricks.parallel.compiled_stand_in import stand_in_for_compiled
from lightning_tricks.parallel.shard import materialize

# The lines of a breakdown, in the order in which they are shown.
LINES = (
    "weights", "averages", "gradients", "optimizer state", "communication", "gathered weights", "activations",
    "head and loss", "working memory", "snapshots",
)  # fmt: skip
FORWARD, LOSS, LOSS_BACKWARD, LAST, BETWEEN, FIRST, REST, STEP = (
    "forward pass", "head and loss", "backward pass of head and loss", "backward pass of the last block",
    "backward pass of the blocks between", "backward pass of the first block", "backward pass of the rest",
    "optimizer step",
)  # fmt: skip
_SETUP = "setup"
_aten = torch.ops.aten
# Numbers that oneDNN keeps for each output of an LSTM: 4 gates, 2 states, 2 cells, and room for 6 gradients of these.
# With its padding, 15.6 were measured at a width of 256 (torch 2.13).
_ONEDNN_LSTM = 14


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a device at the largest moment of each instant of a step.

    Attributes:
        instants: by name, in their order; each has the bytes of some of `LINES`.
        notes: what was counted otherwise than it will be.
        host: bytes of the host's memory at their largest moment, by the same lines, where shards are kept there.
        steps_in_batches: whether the optimizer's temporary memory is that of a batch, as Muon's.
    """

    instants: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    host: Mapping[str, int] = field(default_factory=dict)
    steps_in_batches: bool = False

    @property
    def largest(self) -> str:
        """Name of the instant that takes most."""
        return max(self.instants, key=lambda name: sum(self.instants[name].values()))

    @property
    def peak(self) -> int:
        """Bytes of the largest instant."""
        return sum(self.instants[self.largest].values())

    def at_depth(self, other: "StepMemory", depths: tuple[int, int], depth: int) -> "StepMemory":
        """The memory of a deeper model: each line grows by the same bytes with each block.

        Args:
            other: of the same model with `depths[1]` blocks; this one has `depths[0]`, at least 2.
            depths: see there.
            depth: number of blocks wanted.
        """
        steps = (depth - depths[0]) / (depths[1] - depths[0])

        def grown(lines: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
            sizes = {
                line: round(lines.get(line, 0) + steps * (more.get(line, 0) - lines.get(line, 0)))
                for line in LINES
                if line in lines or line in more
            }
            return {line: size for line, size in sizes.items() if size > 0}

        found = {name: grown(lines, other.instants.get(name, lines)) for name, lines in self.instants.items()}
        if self.steps_in_batches and STEP in found:
            both = (self.instants[STEP], other.instants.get(STEP, {}))
            found[STEP]["working memory"] = max(lines.get("working memory", 0) for lines in both)
        return StepMemory(found, self.notes, grown(self.host, other.host), self.steps_in_batches)


@dataclass(frozen=True)
class TraceOptions:
    """How the step runs.

    Args:
        loss: runs the forward pass and returns a loss; called once a micro-batch, and makes its own batch.
        optimizer: makes the optimizer of the module; None: the optimizer is not counted.
        micro_batches: 1, or more, of which the last is traced, with gradients there before.
        gradients_wait: whether gradients are summed over the ranks only in the last micro-batch; two are traced then.
        context: around each forward pass, such as autocast.
        compiled: whether the blocks are compiled.
        on_gpu: count the kernels that a GPU has in place of those of a CPU.
        offloads: whether FSDP2 keeps the shards on the host, see `_mark_host`.
        replaced: (owner, name, value) of attributes that have another value during the trace.
    """

    loss: Callable[[Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    micro_batches: int = 1
    gradients_wait: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiled: bool = False
    on_gpu: bool = True
    offloads: bool = False
    replaced: Sequence[tuple[Any, str, Any]] = field(default=())


def trace_step(module: nn.Module, blocks: Mapping[str, nn.Module], options: TraceOptions) -> StepMemory:
    """Trace one step of a module whose tensors are on the meta device, or have data that no one will need.

    Args:
        module: divided already where it will be.
        blocks: its repeated blocks, by which the instants of the backward pass are told apart.
        options: see there.

    Raises:
        Exception: what the module's own code raises on tensors without data, such as a value that is read.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(nothing_compiled())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        materialize(module, torch.device("cpu"))
        for replacement in options.replaced:
            stack.enter_context(replaced(*replacement))
        if options.on_gpu and not options.compiled:
            stack.enter_context(replaced(F, "rms_norm", _fused_rms_norm))
        log = _AllocationLog()
        if options.compiled:
            notes = stack.enter_context(stand_in_for_compiled(blocks.values(), log.paused))
        for tensor in [*module.parameters(), *module.buffers()]:
            for plain in _plain_parts(local(tensor)):
                log.record(plain, "weights")
        stack.enter_context(_instants_by_hooks(blocks, log))
        stack.enter_context(_resizes_recorded(log))
        optimizer = None if options.optimizer is None else options.optimizer(module)
        with _Allocations(log, options, notes):
            if options.micro_batches > 1 and not options.gradients_wait:
                _add_gradients(module, log)
            for number in range(2 if options.micro_batches > 1 and options.gradients_wait else 1):
                log.is_last_micro_batch = options.micro_batches == 1 or not options.gradients_wait or number == 1
                if options.gradients_wait and isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(log.is_last_micro_batch)
                log.instant = FORWARD
                with options.context():
                    loss = options.loss(module)
                log.end_of_forward()
                log.instant = LOSS_BACKWARD
                loss.backward()
                del loss
                log.end_of_backward()
            if optimizer is not None:
                for part in _parts(optimizer):
                    _as_on_its_device(part, options.on_gpu and not options.offloads)
                log.instant = _SETUP  # makes the state, where the next step has it already
                optimizer.step()
                log.end_of_step()
                log.instant = STEP
                optimizer.step()
                log.end_of_step()
        if options.offloads:
            _mark_host(module, log)
        instants = log.largest_of_each_instant()
        if options.micro_batches == 1:
            _add_gradients_of_last_step(instants)
        return StepMemory(instants, tuple(dict.fromkeys(notes)), log.largest_on_host(), _steps_in_batches(optimizer))


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run all code as it is written; torchao's optimizers compile each step, and torch's compiler loads slowly."""

    def compiled(function: Any = None, **options: Any) -> Any:
        return (lambda given: given) if function is None else function

    with torch.compiler.set_stance("force_eager"), replaced(torch, "compile", compiled):
        yield


def _add_gradients_of_last_step(instants: dict[str, dict[str, int]]) -> None:
    """Lightning drops the gradients of a step after the next forward pass, before its backward pass."""
    gradients = instants.get(STEP, {}).get("gradients", 0)
    for name in {FORWARD, LOSS} & instants.keys() if gradients else ():
        lines = {**instants[name], "gradients": gradients}
        instants[name] = {line: lines[line] for line in LINES if line in lines}


def _add_gradients(module: nn.Module, log: "_AllocationLog") -> None:
    """The gradients of an earlier micro-batch, to which those of the last one are added."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            log.record(local(parameter.grad), "gradients")
            log.live[local(parameter.grad).untyped_storage()._cdata].line = "gradients"


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors of which one of another class is made, such as a weight that FSDP2 gathers in fp8; or itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]


def _mark_host(module: nn.Module, log: "_AllocationLog") -> None:
    """Say which memory FSDP2's CPUOffloadPolicy has on the host: shards, their gradients, and all of the optimizer.

    A group's shards are copied to the device before they are gathered, and its reduced gradients to the host at once.
    Scalars and buffers stay on the device; their part of the optimizer is a few bytes.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`all_gather_inputs`) and _fsdp_collectives.py
        (`foreach_reduce`) of torch 2.13.
    """
    for parameter in module.parameters():
        for tensor in (parameter, parameter.grad):
            if isinstance(tensor, DTensor):
                for part in _plain_parts(local(tensor)):
                    log.live[part.untyped_storage()._cdata].on_host = True
    for _, entry, _ in log.events:
        entry.on_host |= entry.line == "optimizer state" or entry.instant == STEP


def _parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of which one is composed, or itself."""
    parts = getattr(optimizer, "optimizers", None)
    return list(parts.values()) if isinstance(parts, dict) else [optimizer]


def _steps_in_batches(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether one of the optimizers says so, and no BF16Step makes copies of all weights around its step."""
    if optimizer is None or "step" in vars(optimizer):
        return False
    return any(getattr(part, "steps_in_batches", False) for part in _parts(optimizer))


def _as_on_its_device(optimizer: torch.optim.Optimizer, is_gpu: bool) -> None:
    """Take the implementation that an optimizer takes on a GPU, or else on this CPU, if none was asked for."""
    for group in optimizer.param_groups:
        if is_gpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
        if "ns_dtype" in group:  # of Muon, which measures it on a CPU
            group["ns_dtype"] = "bfloat16" if is_gpu or has_fast_bf16("cpu") else "float32"


class _FusedRMSNorm(torch.autograd.Function):
    """What torch's kernel for GPUs keeps: its input, and a number for each row. No values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rms_norm in a trace of the memory", "measure such a step on the GPU itself")
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight, len(shape))


class _Storage:
    """One piece of memory."""

    __slots__ = ("instant", "line", "on_host", "size", "weak")

    def __init__(self, size: int, line: str, instant: str) -> None:
        self.size, self.line, self.instant = size, line, instant
        self.on_host = False
        self.weak: Any = None


class _AllocationLog:
    """Allocations and releases in their order, each with its instant of the step."""

    def __init__(self) -> None:
        self._instant = _SETUP
        self.is_paused, self.is_last_micro_batch = False, True
        self.live: dict[int, _Storage] = {}
        self.events: list[tuple[str, _Storage, int]] = []

    @property
    def instant(self) -> str:
        """Instant in which the step is now."""
        return self._instant

    @instant.setter
    def instant(self, name: str) -> None:
        self._instant = name
        self._add(_Storage(0, "working memory", name), 0)  # also where nothing will be allocated

    def _add(self, entry: "_Storage", change: int) -> None:
        # instants of the first micro-batch are smaller, and not told apart
        self.events.append((self._instant if self.is_last_micro_batch else _SETUP, entry, change))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the `with`, which may be nested."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def record(self, tensor: Tensor, line: str = "working memory") -> None:
        """A tensor's memory, if it is not known yet."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self.live or self.is_paused:
            return
        entry = _Storage(memory.nbytes(), line, self.instant)

        def released(_: Any) -> None:
            if self.live.get(key) is entry:
                del self.live[key]
            self._add(entry, -entry.size)

        entry.weak = ref(memory, released)
        self.live[key] = entry
        self._add(entry, entry.size)

    def record_resize(self, memory: Any, size: int) -> None:
        """FSDP2 drops gathered weights by giving their memory the size 0."""
        entry = self.live.get(memory._cdata)
        if entry is not None:
            entry.line = "gathered weights"
            self._add(entry, size - entry.size)
            entry.size = size

    def record_temporary(self, size: int) -> None:
        """Memory that an operation takes for itself and gives back."""
        entry = _Storage(size, "working memory", self.instant)
        self._add(entry, size)
        self._add(entry, -size)

    def end_of_forward(self) -> None:
        """What was made in the forward pass and is still there waits for the backward pass."""
        for entry in self.live.values():
            if entry.line == "working memory" and entry.instant in (FORWARD, LOSS):
                entry.line = "activations" if entry.instant == FORWARD else "head and loss"

    def end_of_backward(self) -> None:
        """What was made in the backward pass and is still there is a gradient."""
        for entry in self.live.values():
            if entry.line == "working memory" and entry.instant not in (_SETUP, FORWARD, LOSS):
                entry.line = "gradients"

    def end_of_step(self) -> None:
        """What a step has made and is still there is the optimizer's state; some make it anew in each step."""
        for entry in self.live.values():
            if entry.line == "working memory" and entry.instant in (_SETUP, STEP):
                entry.line = "optimizer state"

    def largest_of_each_instant(self) -> dict[str, dict[str, int]]:
        """The lines of the device at the largest moment of each instant; the state is there in all of them."""
        now: dict[str, int] = defaultdict(int)
        total, largest, found = 0, dict[str, int](), dict[str, dict[str, int]]()
        for instant, entry, change in self.events:
            passing = 0  # a group's reduced gradients, on their way to the host
            if not entry.on_host:
                now[entry.line] += change
                total += change
            elif entry.line == "gradients" and change > 0 and entry.instant != _SETUP:
                passing = change
            if instant != _SETUP and (instant not in found or total + passing > largest[instant]):
                largest[instant], found[instant] = total + passing, dict(now)
                found[instant]["working memory"] = now["working memory"] + passing
        states = [entry for entry in self.live.values() if entry.line == "optimizer state"]
        state = sum(entry.size for entry in states if not entry.on_host)
        for instant, lines in found.items():
            if state and instant != STEP:
                lines["optimizer state"] = state
        return {instant: {line: lines[line] for line in LINES if lines.get(line)} for instant, lines in found.items()}

    def largest_on_host(self) -> dict[str, int]:
        """The lines of the host at its largest moment."""
        now: dict[str, int] = defaultdict(int)
        found: dict[str, int] = {}
        for _, entry, change in self.events:
            if entry.on_host:
                now[entry.line] += change
                if sum(now.values()) > sum(found.values()):
                    found = dict(now)
        return {line: found[line] for line in LINES if found.get(line)}


class _Allocations(TorchDispatchMode):
    """Records the results of each operation on this rank's tensors."""

    supports_higher_order_operators = True  # the partitioner's, around attention that runs again

    def __init__(self, log: _AllocationLog, options: TraceOptions, notes: list[str]) -> None:
        super().__init__()
        self.log, self.on_gpu, self.offloads, self.notes = log, options.on_gpu, options.offloads, notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, an 8-bit state: it comes again with the tensors of which it is made
        result = self._run(func, args, kwargs or {})
        name = func.name() if callable(func.name) else func.name
        line = "gathered weights" if name.startswith("fsdp::all_gather") else "working memory"
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not hasattr(value, "__tensor_flatten__"):
                self.log.record(value, line)
        if func is _aten.convolution_backward.default and not self.on_gpu:
            self.log.record_temporary(args[0].nbytes + args[1].nbytes)  # oneDNN copies both into its own layout
        if self.offloads and (func is _aten._to_copy.default or name.startswith("fsdp::all_gather_copy_in")):
            shards = [value for value in tree_leaves(args) if isinstance(value, Tensor) and self._is_shard(value)]
            self.log.record_temporary(sum(shard.nbytes for shard in shards))  # its copy on the device
        return result

    def _is_shard(self, tensor: Tensor) -> bool:
        entry = self.log.live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.line == "weights" and self.log.instant not in (_SETUP, STEP)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation, with what torch 2.13 leaves out of its form without data."""
        if func is _aten._grouped_mm.default and args[0].dtype == torch.float32:  # computed, but known in bf16 alone
            return func(*(one.to(torch.bfloat16) for one in args[:2]), *args[2:], **kwargs).to(torch.float32)
        result = func(*args, **kwargs)
        if func is _aten.mkldnn_rnn_layer.default:  # its workspace has no bytes
            if self.on_gpu:
                self.notes.append("what cuDNN keeps for an LSTM is not known: counted as on a CPU")
            outputs, *states, workspace = result
            return (outputs, *states, workspace.new_empty(_ONEDNN_LSTM * outputs.nbytes))
        return result


@contextmanager
def _resizes_recorded(log: _AllocationLog) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def recorded(memory: Any, size: int) -> Any:
        result = resize(memory, size)
        log.record_resize(memory, size)
        return result

    with replaced(torch.UntypedStorage, "resize_", recorded):
        yield


@contextmanager
def _instants_by_hooks(blocks: Mapping[str, nn.Module], log: _AllocationLog) -> Iterator[None]:
    """Set the instant of the log by hooks on the blocks."""
    names = list(blocks)
    handles = []

    def enter(instant: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            log.instant = instant

        return hook

    def hooks_of(place: int) -> Callable[[nn.Module, Any, Any], None]:
        instant = LAST if place == len(names) - 1 else FIRST if place == 0 else BETWEEN

        def after(block: nn.Module, args: Any, output: Any) -> None:
            for value in tree_leaves(output)[:1]:
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(enter(instant))
            if place == len(names) - 1:
                log.instant = LOSS
            for value in tree_leaves(args)[:1] if place == 0 else ():
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(enter(REST))

        return after

    for place, block in enumerate(blocks.values()):
        handles.append(block.register_forward_hook(hooks_of(place)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
