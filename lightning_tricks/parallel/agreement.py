"""Ranks that agree: what fails on one fails on all, so that none waits for ever; and rank 0's values are everyone's."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._core.errors import UsageError

T = TypeVar("T")


class _Failure(NamedTuple):
    """What other ranks are told of an error: an exception itself may not be pickled."""

    kind: type[Exception]  # UsageError, OSError, or RuntimeError for every other error
    text: str
    errno: int | None


def on_all_ranks(act: Callable[[], T], group: Any = None) -> list[T]:
    """Call `act` on every rank; every rank must call.

    Args:
        act: its result can be pickled. If it communicates itself, it must fail on all ranks or on none.
        group: the process group that communicates; None for the default one.

    Returns:
        The results of all ranks, by rank.

    Raises:
        Exception: the error of the lowest rank that failed; OSErrors count only if no rank has another error. It is
            raised as it is on that rank, and on the others as a UsageError, an OSError of the same number, or a
            RuntimeError; the last two name the rank.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as failed:
        error = failed
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (result, error and _describe(error)), group=group)
    failures = {rank: failure for rank, (_, failure) in enumerate(told) if failure}
    if not failures:
        return [found for found, _ in told]
    rank, failure = min(failures.items(), key=lambda entry: (entry[1].kind is OSError, entry[0]))
    if error is not None and rank == dist.get_rank(group):
        raise error
    if failure.kind is UsageError:
        raise UsageError(failure.text)
    text = f"{failure.text} (on rank {rank})"
    if failure.kind is OSError:
        raise OSError(text) if failure.errno is None else OSError(failure.errno, text)
    raise RuntimeError(text)


def on_rank_0(act: Callable[[], T], group: Any = None) -> T:
    """Call `act` on rank 0 while the others wait; returns its result, or raises its error, on all of them."""
    rank = dist.get_rank(group)
    return on_all_ranks(lambda: act() if rank == 0 else None, group)[0]  # type: ignore[return-value]


def _describe(error: Exception) -> _Failure:
    if isinstance(error, UsageError):
        return _Failure(UsageError, str(error), None)
    if isinstance(error, OSError):
        return _Failure(OSError, error.strerror or str(error), error.errno)
    return _Failure(RuntimeError, f"{type(error).__name__}: {error}", None)


def broadcast(tensors: Iterable[Tensor], device: torch.device, group: Any = None) -> None:
    """Give tensors on any device rank 0's values, in place; every rank must call.

    A process group sends memory as it lies, so a tensor that is not dense goes as a contiguous copy. A tensor that has
    rank 0's values already is not written: whoever watches the writes to it (`Tensor._version`) is told of none.

    Args:
        tensors: parameters, buffers or others, of the same shapes on all ranks; expanded ones have equal values along
            the expanded dimensions on rank 0.
        device: one on which the process group communicates.
        group: the process group, whose first rank has the values; None for the default one.
    """
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            own = tensor.detach()
            there = own.to(device).contiguous()
            dist.broadcast(there, group=group, group_src=0)
            if torch.equal(own, there.to(own.device)):
                continue
            if 0 in own.stride():  # expanded: elements that share memory are written once
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in own.stride())
                own, there = own[once], there[once]
            own.copy_(there)
