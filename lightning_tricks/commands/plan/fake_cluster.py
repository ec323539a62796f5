"""A cluster of any size on one machine: any rank's part of a module, and the collectives of a step, sent to nobody."""

import gc
import importlib
import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local
from lightning_tricks.parallel.dims import Mesh, ParallelDims
from lightning_tricks.parallel.parallelize import ParallelOptions, layout_table, parallelize
from lightning_tricks.parallel.pipeline import Cut
from lightning_tricks.parallel.shard import local_bytes

T = TypeVar("T")

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NOTHING_SENT = ("wait_tensor", "monitored_barrier_")


@dataclass(frozen=True)
class Collective:
    """One operation over a process group.

    Attributes:
        name: torch's, such as `_allgather_base_`.
        sizes: shape and dtype of each of its tensors.
        ranks: number of ranks in the group.
    """

    name: str
    sizes: tuple[str, ...]
    ranks: int

    def __str__(self) -> str:
        """As a message names it."""
        return f"{self.name} of {', '.join(self.sizes)} over {self.ranks} ranks"


@dataclass(frozen=True)
class RankView:
    """What one rank of a cluster has and does.

    Attributes:
        rank: in the world.
        parameters: shape of this rank's part of each parameter, by name.
        bytes: of these parts.
        collectives: of one step, in their order; empty without a step.
        table: the lines that this rank would say at its start, see `layout_table`.
    """

    rank: int
    parameters: dict[str, tuple[int, ...]]
    bytes: int
    collectives: tuple[Collective, ...]
    table: str


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A default process group of `world` processes in which this one is `rank`, and nothing is ever sent.

    Raises:
        UsageError: this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which also makes the backend known

    if dist.is_initialized():
        raise UsageError("a fake cluster needs a process without a process group: start it outside of a run")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _view(
    build: Callable[[], nn.Module],
    dims: ParallelDims,
    options: ParallelOptions,
    rank: int,
    step: Callable[[Any], Tensor] | None,
    cut: Callable[[nn.Module, ParallelDims, int], Cut | None] | None,
) -> RankView:
    with fake_world(rank, dims.world):
        with torch.device("meta"):
            module = build()
        stages = None if cut is None else cut(module, dims, rank)
        made = parallelize(module, Mesh.of(dims, "cpu"), options, list(stages.stages.values()) if stages else None)
        shapes = {name: tuple(local(parameter).shape) for name, parameter in module.named_parameters()}
        table = layout_table(dims, made, options, module, stages)
        collectives = () if step is None else _trace(module, partial(step, stages) if stages else step)
        return RankView(rank, shapes, local_bytes(module), collectives, table)


def compare_ranks(views: Sequence[RankView]) -> None:
    """Refuse ranks whose collectives would not fit: the job would hang, or mix up tensors.

    Raises:
        UsageError: naming two ranks and the first collective in which they differ.
    """
    first = views[0]
    for view in views[1:]:
        for place in range(max(len(first.collectives), len(view.collectives))):
            one, other = _at(first, place), _at(view, place)
            if one != other:
                raise UsageError(
                    f"rank {view.rank} and rank {first.rank} would wait for each other for ever: collective "
                    f"{place + 1} of a step is {other} on rank {view.rank}, and {one} on rank {first.rank}"
                )


def _at(view: RankView, place: int) -> str:
    return str(view.collectives[place]) if place < len(view.collectives) else "none"


def view_cluster(
    build: Callable[[], nn.Module],
    dims: ParallelDims,
    options: ParallelOptions,
    step: Callable[..., Tensor] | None = None,
    ranks: Sequence[int] | None = None,
    cut: Callable[[nn.Module, ParallelDims, int], Cut | None] | None = None,
) -> list[RankView]:
    """Build a module on the meta device, divide it as ranks of a cluster would, and trace a step of it on each.

    In forked processes beside each other: DTensor remembers the groups of a mesh, so that a process can be one rank
    only.

    Args:
        build: makes the module; called on the meta device.
        dims: of `of_world`.
        options: for `parallelize`.
        step: returns a loss of the module, which is traced with its backward pass on tensors without data; None: none.
        ranks: from 0 to `dims.world` - 1; None: the first, the middle and the last that have the same layers as rank 0.
        cut: leaves in a module what the stages of a rank have, see `FSDP2Strategy.cut_stages`; `step` then takes
            what it returns before the module.

    Raises:
        UsageError: see `parallelize` and `compare_ranks`; this process has a process group already.
        RuntimeError: any other error, with its traceback.
    """
    if ranks is None:
        alike = dims.world // dims.pipeline
        ranks = sorted({0, alike // 2, alike - 1})
    views = at_once([partial(_view, build, dims, options, rank, step, cut) for rank in ranks])
    compare_ranks(views)
    return views


def at_once(acts: Sequence[Callable[[], T]]) -> list[T]:
    """The results of several calls, each in a forked process of its own, beside each other.

    Raises:
        UsageError: that of the first call that raises one.
        RuntimeError: any other error, with its traceback.
    """
    importlib.import_module("torch._dynamo")  # which takes a second, and each process would need it
    started = [_start(act) for act in acts]
    found = [_result(one) for one in started]
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def _start(act: Callable[[], Any]) -> tuple[Any, Any]:
    """A forked process that calls `act`, and the end of the pipe that gives its result or its error."""
    context: Any = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        gc.freeze()  # a dead process group of before would be waiting for its threads, which a fork does not have
        torch.set_num_threads(1)
        # in a thread of its own: meshes that this process had before are of another thread, and not taken for equal
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()

    def answer() -> None:
        try:
            there.send(act())
        except UsageError as error:
            there.send(error)
        except Exception:
            there.send(RuntimeError(traceback.format_exc()))

    process = context.Process(target=run)
    process.start()
    there.close()
    return process, here


def _result(started: tuple[Any, Any]) -> Any:
    """What a process of `_start` found, or its error."""
    process, results = started
    try:
        found = results.recv()
    except EOFError:
        found = RuntimeError("a rank of the fake cluster ended without a word: is there too little memory?")
    process.join()
    return found


def _trace(module: nn.Module, step: Callable[[Any], Tensor]) -> tuple[Collective, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        with _Record() as record:
            step(module).backward()
    return tuple(record.found)


class _Record(TorchDispatchMode):
    """Notes each collective, and lets it run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with this rank's parts
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in _NAMESPACES and name not in _NOTHING_SENT:
            values, _ = tree_flatten((args, kwargs or {}))
            tensors = [value for value in values if isinstance(value, Tensor)]
            sizes = tuple(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
            self.found.append(Collective(name, sizes, _ranks_of(values)))
        return func(*args, **(kwargs or {}))


def _ranks_of(values: Sequence[Any]) -> int:
    """Number of ranks of the group among a collective's arguments."""
    for value in values:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value).size()
    names: list[Any] = [value for value in values if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]).size() if names else dist.get_world_size()
