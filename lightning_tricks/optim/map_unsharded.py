"""Compute whole matrices of which each rank has a part, or a copy: each matrix on one rank, its result on all."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_tricks._core.tensors import local

Make = Callable[[Sequence[int]], list[Tensor]]  # numbers of matrices -> the matrices
Compute = Callable[[Sequence[int], list[Tensor]], list[Tensor]]  # numbers, whole matrices -> matrices of these shapes


class RankGroup(NamedTuple):
    """The ranks that work together on a matrix.

    Args:
        mesh: of a matrix that lies in parts on several ranks.
        shard_dim: dimension of `mesh` along which the ranks have its rows, or columns; None where there are several.
        copies: ranks that have the same rows, or all of them; None for one.
    """

    mesh: DeviceMesh | None = None
    shard_dim: int | None = None
    copies: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, tensor: Tensor, copies: dist.ProcessGroup | None = None) -> "RankGroup":
        """The ranks of a tensor; `copies` are the ranks that have a plain tensor too."""
        if not isinstance(tensor, DTensor):
            return cls(copies=copies)
        mesh = tensor.device_mesh
        divided = [(dim, placement) for dim, placement in enumerate(tensor.placements) if mesh.size(dim) > 1]
        replicas = [dim for dim, placement in divided if type(placement) is Replicate]
        shards = [dim for dim, placement in divided if type(placement) is Shard]
        if len(replicas) + len(shards) < len(divided) or len(shards) > 1:
            return cls(mesh)
        group = mesh.get_group(replicas[0]) if replicas else None
        return cls(mesh, shards[0], group) if shards else cls(copies=group)

    @property
    def ranks(self) -> int:
        """Number of ranks among which whole matrices are divided."""
        shards = 1 if self.mesh is None or self.shard_dim is None else self.mesh.size(self.shard_dim)
        return shards * (1 if self.copies is None else self.copies.size())


def map_unsharded(
    likes: Sequence[Tensor], rank_group: RankGroup, make: Make, compute: Compute, dtype: torch.dtype
) -> list[Tensor]:
    """`compute` of each matrix; every rank of the group must call, with the same matrices in the same order.

    Ranks that have copies compute some of the matrices each, and send the results to each other. Ranks that have rows,
    or columns, as under FSDP2, send them so that each rank has some whole matrices, and the results back. Either way a
    rank computes matrices that stand one after the other, and none is computed twice. A matrix that is divided along
    several mesh dimensions is gathered and computed on every rank.

    Args:
        likes: plain tensors or DTensors with the shapes and placements of the matrices; their values are not read.
        rank_group: `RankGroup.of` each of them.
        make: gives the matrices of some numbers; it is asked for those that this rank has to compute or to send, once.
            Parts are sent in bf16.
        compute: of (numbers of matrices, whole matrices).
        dtype: of the results of `compute`.

    Returns:
        Local tensors: the result for each matrix, or this rank's shard of it.
    """
    numbers = range(len(likes))
    if rank_group.copies is None:
        return _map_parts(likes, numbers, rank_group, make, compute, dtype)
    rank, world = rank_group.copies.rank(), rank_group.copies.size()
    runs = _runs(numbers, world)
    found = _map_parts([likes[number] for number in runs[rank]], runs[rank], rank_group, make, compute, dtype)
    shapes = [local(like).shape for like in likes]
    sizes = [sum(shapes[number].numel() for number in run) for run in runs]
    results = torch.empty(world, max(sizes), dtype=dtype, device=local(likes[0]).device)
    own = torch.empty_like(results[rank])  # all ranks send equally much
    if found:
        torch.cat([result.flatten() for result in found], out=own[: sizes[rank]])
    dist.all_gather(list(results.unbind()), own, rank_group.copies)
    joined: list[Tensor] = []
    for run, row, size in zip(runs, results, sizes, strict=True):
        parts = row[:size].split([shapes[number].numel() for number in run])
        joined += [part.view(shapes[number]) for number, part in zip(run, parts, strict=True)]
    return joined


def _runs(numbers: Sequence[int], world: int) -> list[Sequence[int]]:
    """The numbers of each of `world` ranks: as many one after the other, and fewer or none for the last ranks."""
    length = -(-len(numbers) // world)
    return [numbers[rank * length : (rank + 1) * length] for rank in range(world)]


def _map_parts(
    likes: Sequence[Tensor],
    numbers: Sequence[int],
    rank_group: RankGroup,
    make: Make,
    compute: Compute,
    dtype: torch.dtype,
) -> list[Tensor]:
    """`map_unsharded` without copies."""
    if not numbers:
        return []
    matrices = make(numbers)
    if rank_group.mesh is None:
        return compute(numbers, [local(matrix) for matrix in matrices])
    if rank_group.shard_dim is not None:
        shards = [_Sharded(matrix, like, rank_group.shard_dim) for matrix, like in zip(matrices, likes, strict=True)]
        return _exchange(shards, numbers, compute, dtype, rank_group.mesh.get_group(rank_group.shard_dim))
    whole: Any = compute(numbers, [_full(matrix) for matrix in matrices])
    divided = [
        distribute_tensor(result, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
        for result, like in zip(whole, likes, strict=True)
    ]
    return [result.to_local() for result in divided]


def _full(matrix: Any) -> Tensor:
    whole: Tensor = matrix.full_tensor()
    return whole


class _Sharded:
    """A matrix of which each rank of a mesh dimension has some rows, or columns."""

    def __init__(self, matrix: Tensor, like: Any, mesh_dim: int) -> None:
        self.local = local(matrix)
        self.dim: int = like.placements[mesh_dim].dim
        self.shape, world = like.shape, like.device_mesh.size(mesh_dim)
        chunk = -(-self.shape[self.dim] // world)
        left = [self.shape[self.dim] - rank * chunk for rank in range(world)]
        self.lengths = [max(0, min(chunk, length)) for length in left]  # of each rank's shard, in the sharded dimension
        self._slice_numel = self.shape.numel() // max(self.shape[self.dim], 1)

    def numel(self, rank: int) -> int:
        """Number of elements in a rank's shard."""
        return self.lengths[rank] * self._slice_numel

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The flat elements of a rank's shard in its shape."""
        return flat.view([self.lengths[rank] if dim == self.dim else size for dim, size in enumerate(self.shape)])


def _exchange(
    batch: list[_Sharded], numbers: Sequence[int], compute: Compute, dtype: torch.dtype, group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's shards of the results; each rank of the group computes a run of the matrices."""
    rank, ranks = group.rank(), range(group.size())
    device = batch[0].local.device
    runs = _runs(range(len(batch)), group.size())
    own = [batch[index] for index in runs[rank]]
    # elements of this rank's shards of each rank's matrices, and of each rank's shards of this rank's matrices
    shard_sizes = [sum(batch[index].numel(rank) for index in run) for run in runs]
    own_sizes = [sum(matrix.numel(other) for matrix in own) for other in ranks]
    received = torch.empty(sum(own_sizes), dtype=torch.bfloat16, device=device)
    sent = torch.cat([matrix.local.flatten().bfloat16() for matrix in batch])
    dist.all_to_all_single(received, sent, own_sizes, shard_sizes, group)
    back = torch.empty(sum(own_sizes), dtype=dtype, device=device)
    if own:
        flat = received.split([matrix.numel(other) for other in ranks for matrix in own])
        wholes = [
            torch.cat([matrix.shard(flat[other * len(own) + index], other) for other in ranks], matrix.dim)
            for index, matrix in enumerate(own)
        ]
        found = compute([numbers[index] for index in runs[rank]], wholes)
        shards = [result.split(matrix.lengths, matrix.dim) for result, matrix in zip(found, own, strict=True)]
        torch.cat([parts[other].flatten() for other in ranks for parts in shards], out=back)
    result = torch.empty(sum(shard_sizes), dtype=dtype, device=device)
    dist.all_to_all_single(result, back, shard_sizes, own_sizes, group)
    parts = result.split([matrix.numel(rank) for matrix in batch])
    return [matrix.shard(part, rank) for matrix, part in zip(batch, parts, strict=True)]
