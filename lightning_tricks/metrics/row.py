"""The values of one optimizer step in the MetricBuffer, their transfer to the host, and the line about a NaN loss."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._trainer.run_facts import reduce_over_all

Names = tuple[str, ...]
TOTAL, COUNT = "_total of ", "_count of "  # prefixes of a mean's name, for its two parts


@dataclasses.dataclass
class Row:
    """Values of one optimizer step: numbers, and tensors that wait on their device until they are read."""

    step: int = 0  # as Lightning counts for its loggers: 0 for the first optimizer step
    wall_time: float = 0.0  # seconds since 1970 at which the host had queued the step
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    tensors: dict[Names, Tensor] = dataclasses.field(default_factory=dict)  # by the names of the numbers inside
    means: dict[str, list[tuple[Tensor, Tensor]]] = dataclasses.field(default_factory=dict)  # totals and counts

    def __bool__(self) -> bool:
        return bool(self.values or self.tensors or self.means)

    def unread(self) -> dict[Names, Tensor]:
        """The tensors that are to be read, by the names of their numbers; for a mean, its total and its count."""
        parts = {
            (part + name,): join_numbers([share[i] for share in shares]).sum() if shares[1:] else shares[0][i]
            for name, shares in self.means.items()
            for i, part in enumerate((TOTAL, COUNT))
        }
        return self.tensors | parts


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each of `tensors` (any shapes and dtypes), with one transfer for each device."""
    kinds: dict[torch.device, dict[tuple[torch.dtype, bool], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(tensor.device, {}).setdefault((tensor.dtype, tensor.dim() == 0), []).append(index)
    numbers: list[list[float]] = [[] for _ in tensors]
    for by_kind in kinds.values():
        joined = [join_numbers([tensors[index] for index in indices]) for indices in by_kind.values()]
        flat, start = (torch.cat(joined) if joined[1:] else joined[0]).tolist(), 0
        for index in itertools.chain.from_iterable(by_kind.values()):
            end = start + tensors[index].numel()
            numbers[index], start = flat[start:end], end
    return numbers


def join_numbers(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of `tensors`, which have one dtype, as a float64 vector: counts and losses keep each digit."""
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # mps has no float64
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(list(tensors)).to(dtype)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)


def join_over_ranks(
    tensors: Sequence[Tensor], joins: Sequence[str | None], strategy: Any, group: Any = None
) -> list[Tensor]:
    """The tensors, with sums or maxima over ranks: one collective for all sums, one for all maxima.

    Args:
        tensors: of any shapes; the same number on every rank, in the same order.
        joins: `sum`, `max` or None for each.
        strategy: the Trainer's, whose `reduce` every rank calls.
        group: of the ranks; None: all.
    """
    joined = list(tensors)
    for join in ("sum", "max"):
        indices = [index for index, kind in enumerate(joins) if kind == join]
        if indices:
            local = join_numbers([tensors[index].to(strategy.root_device, torch.float64) for index in indices])
            sums = reduce_over_all(strategy, local, join, group)
            parts = sums.split([tensors[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                joined[index] = part
    return joined


def join_over_stages(rows: Sequence[Row], joins: Mapping[str, str], group: Any) -> None:
    """Give the rows of each pipeline stage the values of all, in place; every rank must call.

    A value that several have is a sum or the largest one where `joins` says so by its name, and else the first stage's.
    """
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, [row.values for row in rows], group=group)
    for row, *values in zip(rows, *everyones, strict=True):
        row.values = {}
        for name, value in itertools.chain.from_iterable(own.items() for own in values):
            earlier = row.values.get(name)
            if earlier is None:
                row.values[name] = value
            elif name in joins:
                row.values[name] = earlier + value if joins[name] == "sum" else max(earlier, value)


def not_finite_line(rows: Sequence[Row], logged: Mapping[str, Any]) -> str | None:
    """The warning about the first loss that is not finite; None if all are finite, or if StepGuard checks the steps.

    Args:
        rows: an interval's steps, read already.
        logged: latest values by name, such as `trainer.callback_metrics`, for losses that a module logs by itself.
    """
    if not rows or any(name.startswith("_step_guard/") for row in rows for name in row.values):
        return None
    known = [(row.step, name, value) for row in rows for name, value in row.values.items()]
    own = {name for _, name, _ in known}
    others = {name: value for name, value in logged.items() if name not in own and _is_loss(name)}
    known += [(rows[-1].step, name, float(value)) for name, value in others.items()]
    for step, name, value in known:
        if _is_loss(name) and not math.isfinite(value):
            return (
                f"{name} is {value} at step {step}: if the weights are not finite any more, what follows is lost. "
                "Stop, go on from an earlier checkpoint, and add the callback StepGuard, which skips such a step"
            )
    return None


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and not name.startswith("_")
