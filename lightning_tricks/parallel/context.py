"""Parts of each row on several ranks (context parallelism): the positions of a rank, and how it sees the others."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_tricks._core.errors import UsageError, check_choice

Method = Literal["gather", "ulysses"]


def own_positions(length: int, ranks: int, rank: int, device: Any = None) -> Tensor:
    """The positions of a row of `length` that a rank has: a piece from the row's head and the same one from its tail.

    With pieces in plain order the last rank would have twice the mean work: causal attention looks back. The first
    piece of rank i is the i-th of 2 `ranks` pieces, and the second one the i-th from the end.

    Returns:
        (length / ranks,) int64, ascending.
    """
    pieces = torch.arange(length, device=device).view(2 * ranks, -1)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def check_length(length: int, ranks: int) -> None:
    """Refuse rows of a length, in tokens, that is no multiple of twice the number of ranks."""
    if length % (2 * ranks):
        raise UsageError(
            f"mesh.context={ranks}: rows of {length} tokens are no multiple of {2 * ranks}, as each rank has a piece "
            "of the head and one of the tail: take another length"
        )


class ContextParallel:
    """The rank's part of each row. A model whose layers but attention treat positions alone needs nothing else.

    Args:
        group: process group of the ranks that have the parts of the same rows.
        device: type of device on which they communicate.
        method: `gather`: each rank gets the keys and values of the whole row. `ulysses`: ranks exchange positions for
            heads, so that each has some heads of the whole row.

    Raises:
        UsageError: another method.

    Source: gather: Llama Team 2024, https://arxiv.org/abs/2407.21783, section 3.3.2; Jacobs et al. 2023 (Ulysses),
        https://arxiv.org/abs/2309.14509.
    """

    def __init__(self, group: Any, device: str, method: Method = "gather") -> None:
        self.mesh = DeviceMesh.from_group(group, device)
        check_choice("context_method", method, Method)
        self.method = method
        self.ranks, self.rank = group.size(), group.rank()
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._places: dict[torch.device, Tensor] = {}

    def positions(self, length: int, device: torch.device) -> Tensor:
        """See `own_positions` and `check_length`."""
        check_length(length, self.ranks)
        key = (length, device)
        if key not in self._positions:
            self._positions[key] = own_positions(length, self.ranks, self.rank, device)
        return self._positions[key]

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of rows (batch, length, ...)."""
        return rows[:, self.positions(rows.shape[1], rows.device)]

    def whole(self, part: Tensor, dim: int = 1) -> Tensor:
        """The rows of which each rank has `part`; a part's gradient is the sum of all ranks'. Every rank must call."""
        gathered: Any = DTensor.from_local(part, self.mesh, [Shard(dim)], run_check=False)
        gathered = gathered.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return self._in_order(gathered, dim)

    def to_heads(self, part: Tensor) -> Tensor:
        """(batch, heads, part, width) to (batch, some heads, length, width), the whole rows.

        Raises:
            UsageError: the heads are no multiple of the ranks.
        """
        if part.shape[1] % self.ranks:
            raise UsageError(
                f"context_method='ulysses': {part.shape[1]} heads are no multiple of mesh.context={self.ranks}: take "
                "'gather'"
            )
        return self._in_order(self._exchange(part, 2, 1), 2)

    def to_positions(self, heads: Tensor) -> Tensor:
        """The reverse of `to_heads`."""
        length = heads.shape[2]
        order = torch.cat([own_positions(length, self.ranks, rank, heads.device) for rank in range(self.ranks)])
        return self._exchange(heads[:, :, order], 1, 2)

    def _exchange(self, x: Tensor, sharded: int, shard: int) -> Tensor:
        own: Any = DTensor.from_local(x.contiguous(), self.mesh, [Shard(sharded)], run_check=False)
        return own.redistribute(placements=[Shard(shard)]).to_local()

    def _in_order(self, gathered: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, one rank after the other, in the order of the row."""
        ranks = self.ranks
        if gathered.device not in self._places:
            places = [piece * 2 if piece < ranks else (2 * ranks - 1 - piece) * 2 + 1 for piece in range(2 * ranks)]
            self._places[gathered.device] = torch.tensor(places, device=gathered.device)
        pieces = gathered.unflatten(dim, (2 * ranks, -1))
        return pieces.index_select(dim, self._places[gathered.device]).flatten(dim, dim + 1)
