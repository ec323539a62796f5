"""The memory of one optimizer step, traced without data: what is held at each instant, and the largest of them.

The step is the real one, on tensors without data (torch's FakeTensorMode): the module divided by `parallelize`, its
forward and backward pass, the optimizer. Allocations and releases are recorded, so no formula of the model is
needed. `fake_cluster` gives the process group.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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

from lightning_tricks._core.protocols import StepsInBatches
from lightning_tricks._core.replaced import replaced
from lightning_tricks._core.tensors import local, refuse_second_derivative
from lightning_tricks.accounting.device_speed import has_fast_bf16
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


Lines = Mapping[str, int]  # bytes, by the names of `LINES`
# A part of the step: its instant, and the number of the block, negative where it is counted from the last one as in a
# list; 0 in an instant that belongs to no block.
Place = tuple[str, int]
Moments = Mapping[Place, Mapping[int, Lines]]  # the largest moment within each operation, by its number in its place


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a device at the largest moment of each instant of a step.

    Attributes:
        instants: by name, in their order; each has the bytes of some of `LINES`.
        notes: what was counted otherwise than it will be.
        host: bytes of the host's memory at their largest moment, by the same lines, where shards are kept there.
        steps_in_batches: whether the optimizer's temporary memory is that of a batch, as Muon's.
        moments: of the device, from which `at_depth` tells another depth.
        host_moments: the same of the host.
        ranks: bytes of the first, a middle and the last pipeline rank, of which this one takes most.
    """

    instants: Mapping[str, Lines]
    notes: tuple[str, ...] = ()
    host: Lines = field(default_factory=dict)
    steps_in_batches: bool = False
    moments: Moments = field(default_factory=dict, repr=False)
    host_moments: Moments = field(default_factory=dict, repr=False)
    ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """Name of the instant that takes most."""
        return max(self.instants, key=lambda name: sum(self.instants[name].values()))

    @property
    def peak(self) -> int:
        """Bytes of the peak."""
        return sum(self.instants[self.largest].values())

    def changed(self, change: Callable[[str, Lines], Lines], on_host: bool = False) -> "StepMemory":
        """The same with other lines: what `change` returns for an instant's name and its lines."""

        def of(moments: Moments) -> Moments:
            return {
                place: {number: change(place[0], lines) for number, lines in own.items()}
                for place, own in moments.items()
            }

        if on_host:
            return replace(self, host=change("", self.host), host_moments=of(self.host_moments))
        instants = {name: change(name, lines) for name, lines in self.instants.items()}
        return replace(self, instants=instants, moments=of(self.moments))

    def at_depth(self, other: "StepMemory", depths: tuple[int, int], depth: int) -> "StepMemory | None":
        """The memory of a deeper model: at each place of the step, each line grows by the same bytes with each block.

        The largest moments of the two traces may be different ones, so each moment is compared with the one of the same
        place. Between the second block and the last but one all grows evenly, so that one of these two takes most.

        Args:
            other: of the same model with `depths[1]` blocks; this one has `depths[0]`, at least 4.
            depths: see there.
            depth: number of blocks wanted.

        Returns:
            None where the moments do not fit each other, so that nothing can be said but by tracing the whole.
        """
        steps = (depth - depths[0]) / (depths[1] - depths[0])
        device = _grown(self.moments, other.moments, steps, self.steps_in_batches)
        host = _grown(self.host_moments, other.host_moments, steps, self.steps_in_batches)
        if device is None or host is None:
            return None
        return StepMemory(device, self.notes, _largest(host.values()), self.steps_in_batches)


def largest_of_each_instant(moments: Moments) -> dict[str, Lines]:
    """The lines of the largest moment of each instant."""
    found: dict[str, list[Lines]] = defaultdict(list)
    for (instant, _), own in moments.items():
        found[instant].extend(own.values())
    return {instant: _largest(several) for instant, several in found.items()}


def _largest(several: Iterable[Lines]) -> Lines:
    return max(several, key=lambda lines: sum(lines.values()), default={})


def _grown(here: Moments, there: Moments, steps: float, in_batches: bool) -> dict[str, Lines] | None:
    """The largest lines of each instant, `steps` times as far from `here` as `there` is; None where they do not fit."""
    found: dict[str, list[Lines]] = defaultdict(list)
    for place, moments in here.items():
        others = there.get(place, {})
        if place[0] == STEP and (in_batches or moments.keys() != others.keys()):
            # The optimizer takes one weight or one batch after the other, and more of the same where there are more:
            pair = _largest(moments.values()), _largest(others.values())
            if len({lines.get("working memory", 0) for lines in pair}) > 1:  # not so
                return None
            moments, others = {0: pair[0]}, {0: pair[1]}
        if moments.keys() != others.keys():
            return None
        for number, lines in moments.items():
            more = others[number]
            sizes = {line: lines.get(line, 0) + steps * (more.get(line, 0) - lines.get(line, 0)) for line in LINES}
            found[place[0]].append({line: round(size) for line, size in sizes.items() if round(size) > 0})
    return {instant: _largest(several) for instant, several in found.items()}


@dataclass(frozen=True)
class TraceOptions:
    """How the step runs.

    Args:
        loss: runs the forward pass and returns a loss; called once a micro-batch, and makes its own batch.
        optimizer: makes the optimizer of the module; None: the optimizer is not counted.
        micro_batches: 1, or more, of which the last is traced, with gradients there before.
        gradients_wait: whether gradients are summed over the ranks only in the last micro-batch; two are traced then.
        context: around each forward pass, such as autocast.
        on_gpu: count the kernels that a GPU has in place of those of a CPU.
        offloads: whether FSDP2 keeps the shards on the host, see `_mark_host`.
        replaced: (owner, name, value) of attributes that have another value during the trace.
    """

    loss: Callable[[Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    micro_batches: int = 1
    gradients_wait: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
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
        if options.on_gpu:
            stack.enter_context(replaced(F, "rms_norm", _fused_rms_norm))
        log = _AllocationLog()
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
                log.enter(FORWARD)
                with options.context():
                    loss = options.loss(module)
                log.end_of_forward()
                log.enter(LOSS_BACKWARD)
                loss.backward()
                del loss
                log.end_of_backward()
            if optimizer is not None:
                for part in _parts(optimizer):
                    _as_on_its_device(part, options.on_gpu and not options.offloads)
                log.enter(_SETUP)  # makes the state, where the next step has it already
                optimizer.step()
                log.end_of_step()
                log.enter(STEP)
                optimizer.step()
                log.end_of_step()
        if options.offloads:
            _mark_host(module, log)
        device, host = log.moments(), log.moments(on_host=True)
        memory = StepMemory(
            largest_of_each_instant(device),
            tuple(dict.fromkeys(notes)),
            _largest(lines for moments in host.values() for lines in moments.values()),
            _steps_in_batches(optimizer),
            device,
            host,
        )
        return _with_gradients_of_last_step(memory) if options.micro_batches == 1 else memory


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run all code as it is written; torchao's optimizers compile each step, and torch's compiler loads slowly."""

    def compiled(function: Any = None, **options: Any) -> Any:
        return (lambda given: given) if function is None else function

    with torch.compiler.set_stance("force_eager"), replaced(torch, "compile", compiled):
        yield


def _with_gradients_of_last_step(memory: StepMemory) -> StepMemory:
    """Lightning drops the gradients of a step after the next forward pass, before its backward pass."""
    gradients = memory.instants.get(STEP, {}).get("gradients", 0)

    def change(instant: str, lines: Lines) -> Lines:
        return {**lines, "gradients": gradients} if gradients and instant in (FORWARD, LOSS) else lines

    return memory.changed(change)


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
    for _, _, entry, _ in log.events:
        entry.on_host |= entry.line == "optimizer state" or entry.instant == STEP


def _parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of which one is composed, or itself."""
    parts = getattr(optimizer, "optimizers", None)
    return list(parts.values()) if isinstance(parts, dict) else [optimizer]


def _steps_in_batches(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether one of the optimizers says so, and no BF16Step makes copies of all weights around its step."""
    if optimizer is None or "step" in vars(optimizer):
        return False
    return any(isinstance(part, StepsInBatches) and part.steps_in_batches for part in _parts(optimizer))


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
        self._place: Place = (_SETUP, 0)
        self._operations = Counter[Place]()
        self.is_last_micro_batch = True
        self.live: dict[int, _Storage] = {}
        self.events: list[tuple[Place, int, _Storage, int]] = []

    @property
    def instant(self) -> str:
        """Instant in which the step is now."""
        return self._place[0]

    def enter(self, instant: str, block: int = 0) -> None:
        """Another place of the step begins."""
        self._place = (instant, block)
        self._add(_Storage(0, "working memory", instant), 0)  # also where nothing will be allocated

    def next_operation(self) -> None:
        """Another operation begins."""
        self._operations[self._place] += 1

    def _add(self, entry: "_Storage", change: int) -> None:
        # instants of the first micro-batch are smaller, and not told apart
        place = self._place if self.is_last_micro_batch else (_SETUP, 0)
        self.events.append((place, self._operations[self._place], entry, change))

    def record(self, tensor: Tensor, line: str = "working memory") -> None:
        """A tensor's memory, if it is not known yet."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self.live:
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

    def moments(self, on_host: bool = False) -> dict[Place, dict[int, Lines]]:
        """The lines at the largest moment of each operation; the state is there in all of them."""
        now: dict[str, int] = defaultdict(int)
        total, found = 0, dict[Place, dict[int, Lines]]()
        for (place, _), events in itertools.groupby(self.events, lambda event: event[:2]):
            largest, lines = -1, dict[str, int]()
            for _, _, entry, change in events:
                passing = 0  # a group's reduced gradients, on their way to the host
                if entry.on_host == on_host:
                    now[entry.line] += change
                    total += change
                elif not on_host and entry.line == "gradients" and change > 0 and place[0] != _SETUP:
                    passing = change
                if total + passing > largest:
                    largest, lines = total + passing, {**now, "working memory": now["working memory"] + passing}
            if place[0] != _SETUP:
                own = found.setdefault(place, {})
                own[len(own)] = lines  # FSDP2 also looks at each parameter once, which takes no memory
        states = [entry for entry in self.live.values() if entry.line == "optimizer state"]
        state = sum(entry.size for entry in states if entry.on_host == on_host)
        return {
            place: {operation: _in_order(place[0], lines, state) for operation, lines in own.items()}
            for place, own in found.items()
        }


def _in_order(instant: str, lines: Lines, state: int) -> Lines:
    lines = {**lines, "optimizer state": state} if state and instant != STEP else lines
    return {line: lines[line] for line in LINES if lines.get(line)}


class _Allocations(TorchDispatchMode):
    """Records the results of each operation on this rank's tensors."""

    supports_higher_order_operators = True

    def __init__(self, log: _AllocationLog, options: TraceOptions, notes: list[str]) -> None:
        super().__init__()
        self.log, self.on_gpu, self.offloads, self.notes = log, options.on_gpu, options.offloads, notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, an 8-bit state: it comes again with the tensors of which it is made
        self.log.next_operation()
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
    """Set the place of the log by hooks on the blocks; those that run again in the backward pass leave it."""
    last = len(blocks) - 1
    hooks = ExitStack()

    def on_gradient(output: Any, instant: str, block: int = 0) -> None:
        for value in tree_leaves(output)[:1]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: log.enter(instant, block))

    def hook(number: int, block: nn.Module) -> None:
        counted = number if 2 * number < last else number - last - 1

        def before(block: nn.Module, args: Any) -> None:
            if log.instant == FORWARD:
                log.enter(FORWARD, counted)

        def after(block: nn.Module, args: Any, output: Any) -> None:
            on_gradient(output, LAST if number == last else FIRST if number == 0 else BETWEEN, counted)
            if number == 0:
                on_gradient(args, REST)
            if number == last and log.instant == FORWARD:
                log.enter(LOSS)

        hooks.enter_context(block.register_forward_pre_hook(before, prepend=True))
        hooks.enter_context(block.register_forward_hook(after))

    with hooks:
        for number, block in enumerate(blocks.values()):
            hook(number, block)
        yield
