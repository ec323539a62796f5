"""Compute on sharded matrices as a whole: each rank gathers some of them, computes, and sends the shards back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Compute = Callable[[int, Tensor], Tensor]  # (index of a matrix, the matrix) -> a matrix of the same shape


def on_whole_matrices(matrices: Sequence[Tensor], compute: Compute, dtype: torch.dtype) -> list[Tensor]:
    """`compute` of each matrix; every rank must call, with the same matrices in the same order.

    Matrices that are sharded along one mesh dimension, as by FSDP2, are exchanged in batches, one matrix for each rank:
    each rank gathers one of them, so that no matrix is computed twice. Every other DTensor is gathered on every rank.

    Args:
        matrices: plain tensors or DTensors; the sharded ones are sent in bf16.
        compute: of (index in `matrices`, matrix).
        dtype: of the result of `compute`.

    Returns:
        Local tensors: the result for each matrix, or this rank's shard of it.
    """
    results: dict[int, Tensor] = {}
    sharded: dict[tuple[Any, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if not isinstance(matrix, DTensor):
            results[number] = compute(number, matrix)
        elif (mesh_dim := _sharded_dim(matrix)) is not None:
            sharded.setdefault((matrix.device_mesh, mesh_dim), []).append(number)
        else:
            whole = compute(number, matrix.full_tensor())
            shards = distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)
            results[number] = shards.to_local()
    for (mesh, mesh_dim), numbers in sharded.items():
        group = mesh.get_group(mesh_dim)
        for begin in range(0, len(numbers), group.size()):
            batch = numbers[begin : begin + group.size()]
            found = _exchange([_Sharded(matrices[number], mesh_dim) for number in batch], batch, compute, dtype, group)
            results |= zip(batch, found, strict=True)
    return [results[number] for number in range(len(matrices))]


def _sharded_dim(matrix: DTensor) -> int | None:
    """The one mesh dimension over which a matrix is sharded, if all others hold copies; else None."""
    shards = [dim for dim, placement in enumerate(matrix.placements) if type(placement) is Shard]
    copies = [placement for placement in matrix.placements if type(placement) is Replicate]
    return shards[0] if len(shards) == 1 and len(copies) == len(matrix.placements) - 1 else None


class _Sharded:
    """A matrix of which each rank of a mesh dimension has some rows, or columns."""

    def __init__(self, matrix: Any, mesh_dim: int) -> None:
        self.local: Tensor = matrix.to_local()
        self.dim: int = matrix.placements[mesh_dim].dim
        self.shape, world = matrix.shape, matrix.device_mesh.size(mesh_dim)
        chunk = -(-self.shape[self.dim] // world)
        left = [self.shape[self.dim] - rank * chunk for rank in range(world)]
        self.lengths = [max(0, min(chunk, length)) for length in left]  # of each rank's shard, in the sharded dimension
        self._slice_numel = self.shape.numel() // max(self.shape[self.dim], 1)

    def numels(self) -> list[int]:
        """Number of elements in each rank's shard."""
        return [length * self._slice_numel for length in self.lengths]

    def shard(self, flat: Tensor, length: int) -> Tensor:
        """The flat elements of a shard in its shape."""
        return flat.view([length if dim == self.dim else size for dim, size in enumerate(self.shape)])


def _exchange(
    batch: list[_Sharded], numbers: list[int], compute: Compute, dtype: torch.dtype, group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's shards of the results; rank j of the group computes the j-th matrix."""
    rank, world = group.rank(), group.size()
    device = batch[0].local.device
    own = batch[rank] if rank < len(batch) else None
    # elements of this rank's shard of every matrix, and of every rank's shard of the matrix that this rank computes
    shard_sizes = [matrix.local.numel() for matrix in batch] + [0] * (world - len(batch))
    own_sizes = own.numels() if own else [0] * world
    received = torch.empty(sum(own_sizes), dtype=torch.bfloat16, device=device)
    dist.all_to_all_single(
        received, torch.cat([matrix.local.bfloat16().flatten() for matrix in batch]), own_sizes, shard_sizes, group
    )
    back = torch.empty(0, dtype=dtype, device=device)
    if own is not None:
        shards = [own.shard(*pair) for pair in zip(received.split(own_sizes), own.lengths, strict=True)]
        whole = compute(numbers[rank], torch.cat(shards, own.dim)).to(dtype)
        back = torch.cat([shard.flatten() for shard in whole.split(own.lengths, own.dim)])
    result = torch.empty(sum(shard_sizes), dtype=dtype, device=device)
    dist.all_to_all_single(result, back, shard_sizes, own_sizes, group)
    return [
        matrix.shard(flat, matrix.local.shape[matrix.dim])
        for matrix, flat in zip(batch, result.split(shard_sizes)[: len(batch)], strict=True)
    ]
