"""A sum over the bits of the weights: over all of them, or over one of several parts, so that a step costs little."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_tricks._find_modules import clean_name
from lightning_tricks._tensors import local
from lightning_tricks.monitors.run_ledger.exact_sum import integers, odd_factors, salt, total

LEAST = 8192  # elements of a part at least: fewer take no less time
PER_TENSOR = 4096  # the fixed cost of a tensor, in elements that could be summed in the same time
ROW = 64  # elements that share a factor, at least


def leading_dims(shape: torch.Size) -> int:
    """The number of leading dimensions whose index identifies a row; the values of a row share a factor.

    A row spans the last dimension, or as many of the last dimensions as hold 64 values, but never the first dimension.
    In a vector each value is a row; a 0-dim tensor has one row.
    """
    leading, length = len(shape), 1
    while leading > 1 and length < ROW:
        leading -= 1
        length *= shape[leading]
    return leading


class _Piece:
    """Rows of one parameter on this rank, as a slice of its first dimension.

    Args:
        param: the parameter.
        first, end: of the slice.
        factors: one for each row, computed from its index in the whole parameter.
        counts: whether this rank counts them in `of_all`: other ranks may hold copies.
    """

    def __init__(self, param: Tensor, first: int, end: int, factors: Tensor, counts: bool) -> None:
        self.param, self.first, self.end, self.factors, self.counts = param, first, end, factors, counts
        self._is_sharded = isinstance(param, DTensor)
        self._place, self._rows = 0, torch.empty(0)

    def row_sums(self) -> Tensor:
        """The sum of the integers of each row, (rows,)."""
        here = local(self.param) if self._is_sharded else self.param
        if here.data_ptr() == self._place:  # the memory of `_rows`, which is held here: nobody else can have it
            return self._rows.sum(1)
        rows = self._integers(here.detach())
        if rows.untyped_storage().data_ptr() == here.untyped_storage().data_ptr():  # else it had to be copied
            self._place, self._rows = here.data_ptr(), rows
        return rows.sum(1)

    def _integers(self, here: Tensor) -> Tensor:
        """The integers of each row in the parameter's memory, (rows, integers)."""
        if here.dim() < 2:
            return integers(here).reshape(here.numel(), -1)[self.first : self.end]  # a complex value is two
        rows = here[self.first : self.end]
        if here.dim() > 2:
            rows = rows.flatten(0, leading_dims(self.param.shape) - 1)
        return integers(rows).flatten(1)


class WeightSum:
    """The parameters of a module, cut into parts of consecutive rows with about equally many elements.

    All values of a row share one factor, so that a part is read once, and only one number a row is written. The price:
    two changes in one row that cancel each other in a plain sum are not seen. The factor follows from the row's index
    in the whole parameter and from the parameter's name, so that the parts and their sums do not depend on how the
    weights are sharded.

    Args:
        module: its parameters are on their devices.
        parts: largest number of parts; there are fewer if a part would have less than 8,192 elements.
        rank: of this process. Rank 0 counts a parameter that every rank holds whole.

    Attributes:
        parts: number of parts, the same on every rank.
        recorded: whether there is a parameter that can be read.
        elements: number of weights on this rank.
        sharded: whether ranks may hold different weights.
        left_out: names of parameters whose bits cannot be read, such as those of a tensor subclass.
    """

    def __init__(self, module: nn.Module, parts: int, rank: int) -> None:
        self.left_out: list[str] = []
        params = [(clean_name(name), param) for name, param in module.named_parameters() if self._fits(name, param)]
        costs = [PER_TENSOR + param.numel() for _, param in params]
        self.parts = max(1, min(parts, sum(costs) // LEAST))
        self.recorded = len(params) > 0
        self.elements = sum(local(param).numel() for _, param in params)
        self.sharded = any(isinstance(param, DTensor) for _, param in params)
        self._pieces: list[list[_Piece]] = [[] for _ in range(self.parts)]
        before = 0
        for (name, param), cost in zip(params, costs, strict=True):
            self._cut(name, param, before / sum(costs), cost / sum(costs), rank)
            before += cost
        self._joined = [self._factors_by_device(pieces) for pieces in self._pieces]

    def _fits(self, name: str, param: Tensor) -> bool:
        if is_lazy(param) or type(local(param).detach()) is not Tensor or hasattr(param, "ds_tensor"):
            self.left_out.append(clean_name(name))
            return False
        return param.numel() > 0

    def _cut(self, name: str, param: Tensor, start: float, share: float, rank: int) -> None:
        """Add the rows of a parameter that are on this rank to the parts in which they lie.

        Args:
            name: of the parameter.
            param: the parameter.
            start: share of the total cost that comes before it.
            share: its own share of the cost.
            rank: of this process.
        """
        offsets, counts = _shard_offsets(param, rank)
        slices = param.shape[0] if param.dim() else 1
        here = local(param).shape[0] if param.dim() else 1
        cuts = [math.ceil((part / self.parts - start) / share * slices) for part in range(self.parts)]
        for pieces, low, high in zip(self._pieces, cuts, [*cuts[1:], slices], strict=True):
            first, end = max(low - offsets[0], 0), min(high - offsets[0], here)
            if first < end and local(param).numel():
                factors = odd_factors(_row_index(param, offsets, first, end), salt(name))
                pieces.append(_Piece(param, first, end, factors, counts))

    @staticmethod
    def _factors_by_device(pieces: list[_Piece]) -> dict[torch.device, tuple[list[_Piece], Tensor]]:
        devices = dict.fromkeys(piece.factors.device for piece in pieces)
        found = {device: [piece for piece in pieces if piece.factors.device == device] for device in devices}
        return {device: (own, torch.cat([piece.factors for piece in own])) for device, own in found.items()}

    @torch.no_grad()
    def of_part(self, part: int, device: torch.device) -> Tensor:
        """The sum over this rank's rows of a part, copies included: an int64 on `device`."""
        totals = []
        for own, factors in self._joined[part].values():
            rows = torch.cat([piece.row_sums() for piece in own]) if own[1:] else own[0].row_sums()
            totals.append(total(rows, factors))
        if len(totals) == 1:
            return totals[0]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return sum((each.to(device, non_blocking=True) for each in totals), zero)

    @torch.no_grad()
    def of_all(self, device: torch.device) -> Tensor:
        """The sum over all rows that this rank counts; over all ranks together, each row counts once."""
        result = torch.zeros((), dtype=torch.int64, device=device)
        for piece in (piece for pieces in self._pieces for piece in pieces if piece.counts):
            result += total(piece.row_sums(), piece.factors).to(device)
        return result


def _shard_offsets(param: Any, rank: int) -> tuple[list[int], bool]:
    """Where this rank's shard begins in the whole parameter, by dimension, and whether this rank counts it."""
    if not isinstance(param, DTensor):
        return [0] * max(param.dim(), 1), rank == 0
    (chunk,) = param.__create_chunk_list__()
    coordinate = param.device_mesh.get_coordinate() or [0] * param.device_mesh.ndim
    copies = [index for index, placed in zip(coordinate, param.placements, strict=True) if placed.is_replicate()]
    return list(chunk.offsets) or [0], not any(copies)


def _row_index(param: Tensor, offsets: list[int], first: int, end: int) -> Tensor:
    """Index in the whole parameter of each row of a slice of this rank's shard."""
    here = local(param)
    if here.dim() < 2:
        return torch.arange(first + offsets[0], end + offsets[0], device=here.device)
    index = torch.zeros(1, dtype=torch.int64, device=here.device)
    for dim in range(leading_dims(param.shape)):
        low, high = (first, end) if dim == 0 else (0, here.shape[dim])
        here_index = torch.arange(low + offsets[dim], high + offsets[dim], device=here.device)
        index = (index[:, None] * param.shape[dim] + here_index).flatten()
    return index
