"""What optimizer steps recorded: tensors on their device, and how they become numbers on the host, all at once."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

TOTAL, COUNT = "\0total", "\0count"  # parts of a mean; no metric's name


@dataclasses.dataclass
class Row:
    """What one optimizer step recorded, as plain numbers."""

    step: int  # as Lightning counts for its loggers: 0 for the first optimizer step
    wall_time: float  # seconds since 1970, when the step had been queued
    values: dict[str, float]


@dataclasses.dataclass
class StepRecord:
    """What one optimizer step recorded, still on the device."""

    step: int = 0
    wall_time: float = 0.0
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    vectors: dict[tuple[str, ...], Tensor] = dataclasses.field(default_factory=dict)
    means: dict[str, list[tuple[Tensor, Tensor]]] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.scalars or self.vectors or self.means)

    def tensors(self) -> dict[tuple[str, ...], Tensor]:
        """All that is to be read, by name; a mean as its total and its count."""
        shares = {
            (name, part): join_numbers([share[i] for share in shares]).sum() if shares[1:] else shares[0][i]
            for name, shares in self.means.items()
            for i, part in enumerate((TOTAL, COUNT))
        }
        return {(name,): scalar for name, scalar in self.scalars.items()} | self.vectors | shares


def to_host(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each of `tensors` (any shapes and dtypes), with one transfer a device."""
    kinds: dict[torch.device, dict[tuple[torch.dtype, bool], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault(tensor.device, {}).setdefault((tensor.dtype, tensor.dim() == 0), []).append(index)
    numbers: list[list[float]] = [[] for _ in tensors]
    for by_kind in kinds.values():
        order = [index for indices in by_kind.values() for index in indices]
        joined = [join_numbers([tensors[index] for index in indices]) for indices in by_kind.values()]
        flat, start = (torch.cat(joined) if joined[1:] else joined[0]).tolist(), 0
        for index in order:
            end = start + tensors[index].numel()
            numbers[index] = flat[start:end]
            start = end
    return numbers


def join_numbers(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of `tensors`, which are of one dtype, as one vector; counts and losses keep each digit in float64."""
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # mps has no float64
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(list(tensors)).to(dtype)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)


def rows_of(
    records: Sequence[StepRecord], names: Sequence[Iterable[tuple[str, ...]]], numbers: Sequence[list[float]]
) -> list[Row]:
    """The records with their numbers.

    Args:
        records: of the steps.
        names: the keys of each record's `tensors()`.
        numbers: of all these tensors, in their order.
    """
    found, rows = iter(numbers), []
    for record, recorded in zip(records, names, strict=True):
        values = dict(record.numbers)
        for key in recorded:
            read = next(found)
            if len(key) == 1:
                values[key[0]] = read[0]
            elif key[1] == TOTAL:
                total = read[0]
            elif key[1] == COUNT:
                values[key[0]] = total / read[0] if read[0] else math.nan
            else:
                values.update(zip(key, read, strict=True))
        rows.append(Row(record.step, record.wall_time, values))
    return rows
