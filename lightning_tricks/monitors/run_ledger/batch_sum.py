"""A sum over the bits of a step's batch: it depends on each value and its place, but not on how the batch was split."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._tensors import local
from lightning_tricks.monitors.run_ledger.exact_sum import MODULUS, integers, odd_factors, salt, signed, total

BASE = 0x2545F4914F6CDD1D  # odd; row i of a global batch has the factor BASE**i
SLICE = 1 << 17  # values that are summed at a time
_KEPT = 64  # number of shapes whose factors are kept, for batches of varying length: 64 MiB at most


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The dense tensors in any nesting of mappings, sequences and objects with attributes."""
    if isinstance(batch, Tensor):
        batch = local(batch)
        if batch.layout == torch.strided and not batch.is_nested and batch.numel():
            yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_in(part)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        yield from tensors_in(vars(batch))


class BatchSum:
    """Sums over the bits of the tensors of a micro-batch; `step_sum` joins those of a step.

    Each value is multiplied by a factor for its row in the global batch, and by one for its place in the row. The
    factor of a row is a power of BASE, so that each micro-batch is summed as if it were the first, and the host moves
    the sum to its place later. The factors of small tensors are kept; large ones, such as images, are summed in slices,
    whose factors are computed anew, so that they take no more memory the larger they are.
    """

    def __init__(self) -> None:
        self._factors: dict[Any, Tensor] = {}

    def of_micro_batch(self, batch: Any) -> tuple[list[Tensor], int]:
        """The sum of each tensor, a 0-dim int64 on its device, and the number of rows of the micro-batch."""
        sums, rows = [], 0
        for number, tensor in enumerate(tensors_in(batch)):
            own_rows = tensor.shape[0] if tensor.dim() else 1
            rows, bits = rows or own_rows, integers(tensor)
            if bits.dim() < 2:
                bits = bits.reshape(own_rows, -1)  # a float64 is two integers of one row
            if bits.numel() > SLICE:
                sums.append(_in_slices(bits, number))
            else:
                sums.append(total(bits, self._factors_for(bits, number)))
        return sums, rows

    def _factors_for(self, bits: Tensor, number: int) -> Tensor:
        key = (number, bits.shape, bits.device)
        if key not in self._factors:
            if len(self._factors) >= _KEPT:
                self._factors.clear()
            rows = len(bits)
            factors = _of_rows(rows, bits.device)[:, None] * _of_columns(0, bits.numel() // rows, number, bits.device)
            self._factors[key] = factors.reshape(bits.shape)
        return self._factors[key]


def _in_slices(bits: Tensor, number: int) -> Tensor:
    """The sum of a large tensor, by blocks of places within the rows, and in each by blocks of rows."""
    rows, columns = len(bits), bits[0].numel()
    flat = bits.reshape(rows, columns) if bits.is_contiguous() else bits.flatten(1)
    width = min(columns, SLICE)
    height = min(rows, max(SLICE // width, 1))
    powers, result = _of_rows(height, bits.device), torch.zeros((), dtype=torch.int64, device=bits.device)
    for left in range(0, columns, width):
        factors = _of_columns(left, min(left + width, columns), number, bits.device)
        for first in range(0, rows, height):
            block = flat[first : first + height, left : left + width]
            part = total((block * factors).sum(1), powers[: len(block)])
            result += part * signed(pow(BASE, first, MODULUS))
    return result


def _of_rows(rows: int, device: torch.device) -> Tensor:
    powers = torch.full((rows,), BASE, device=device)
    powers[0] = 1
    return powers.cumprod(0)


def _of_columns(first: int, end: int, number: int, device: torch.device) -> Tensor:
    return odd_factors(torch.arange(first, end, device=device), salt(f"tensor {number}"))


def step_sum(sums: list[int], rows: int, rank: int, world: int) -> int:
    """A rank's share of the sum of a step; the shares of all ranks, added modulo 2**64, are the sum of the step.

    Args:
        sums: of each micro-batch.
        rows: number of rows in a micro-batch. Those of micro-batch m begin at row `(m * world + rank) * rows` of the
            global batch.
        rank: among the processes that see different data.
        world: number of these processes.
    """
    places = ((number * world + rank) * rows for number in range(len(sums)))
    return sum(pow(BASE, place, MODULUS) * value for place, value in zip(places, sums, strict=True)) % MODULUS
