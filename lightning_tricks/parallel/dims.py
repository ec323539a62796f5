"""Sizes of a mesh by name, and which ranks share data, loss and weights; `Mesh` makes their process groups."""

from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_tricks._core.errors import UsageError

__all__ = ["ParallelDims"]

_LATER = ("pipeline", "expert")


@dataclass(frozen=True)
class ParallelDims:
    """Into how many parts each axis of the work is divided; the product is the number of processes.

    Ranks count through the last axis first: tensor ranks are neighbours, on the fastest links; replicas are farthest
    apart. `rank = ((replicate * shards + shard) * contexts + context) * tensors + tensor`.

    Args:
        replicate: model replicas (HSDP); gradients are averaged between them.
        shard: parts of the weights of one replica, by FSDP2, each with rows of its own; -1: all processes that are
            left.
        context: parts of each sequence. FSDP2 divides the weights over these ranks too.
        tensor: parts of each layer's matrices. These ranks have the same data.
        pipeline: stages of the model; only 1 as yet.
        expert: parts of the set of experts; only 1 as yet.

    Raises:
        UsageError: a size that is no whole number of at least 1, or not -1 in `shard`; a pipeline or experts.
    """

    replicate: int = 1
    shard: int = -1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        for axis in fields(self):
            size = getattr(self, axis.name)
            left = axis.name == "shard" and size == -1
            if not left and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                hint = ", or -1 for all processes that are left" if axis.name == "shard" else ""
                raise UsageError(f"mesh.{axis.name}={size!r}: give a whole number of at least 1{hint}")
            if axis.name in _LATER and size != 1:
                raise UsageError(f"mesh.{axis.name}={size}: not supported: leave it at 1")

    def of_world(self, world: int) -> "ParallelDims":
        """The same sizes with `shard` known, for `world` processes.

        Raises:
            UsageError: the sizes do not multiply to `world`.
        """
        given = self.replicate * self.context * self.tensor
        shard = world // given if self.shard == -1 else self.shard
        if shard < 1 or given * shard != world:
            sizes = [(axis.name, getattr(self, axis.name)) for axis in fields(self) if axis.name not in _LATER]
            named = " x ".join(f"{name} {size}" for name, size in sizes if size != 1 and (name, size) != ("shard", -1))
            verb = "does not divide" if self.shard == -1 else "does not make"
            raise UsageError(
                f"mesh: {named or 'shard 1'} {verb} the {world} devices: the sizes must multiply to num_nodes x devices"
            )
        return replace(self, shard=shard)

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of processes that see different rows."""
        return self.replicate * self.shard

    @property
    def loss_ranks(self) -> int:
        """Number of processes that see different tokens: over these a loss is averaged, and so are gradients."""
        return self.data_ranks * self.context

    def data_rank(self, rank: int) -> int:
        """Place of a process among the `data_ranks`; its neighbours along context and tensor have the same rows."""
        return rank // (self.context * self.tensor)

    def context_rank(self, rank: int) -> int:
        """Place of a process among those that have parts of the same rows."""
        return rank // self.tensor % self.context

    def tensor_rank(self, rank: int) -> int:
        """Place of a process among those that have parts of the same matrices."""
        return rank % self.tensor

    def random_rank(self, rank: int) -> int:
        """Process whose random numbers a process draws: tensor ranks have the same activations, and drop the same."""
        return rank - self.tensor_rank(rank)

    def __str__(self) -> str:
        """Such as `replicate 2 x shard 4 x tensor 2`; axes of one part are left out, but for the shards."""
        sizes = {name: getattr(self, name) for name in ("replicate", "shard", "context", "tensor")}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1 or name == "shard")


@dataclass(frozen=True)
class Mesh:
    """The process groups of a run, by what their ranks share. The default process group must exist.

    Attributes:
        dims: sizes, of the whole world.
        device_mesh: axes `replicate`, `shard` (x context) and, if there are tensor ranks, `tensor`, as FSDP2 and
            DTensor take it.
        loss: group of the ranks that have different tokens, of which this rank is one; None: all ranks.
        context: group of the ranks that have the other parts of this rank's rows; None where rows are whole.
    """

    dims: ParallelDims
    device_mesh: DeviceMesh
    loss: Any = field(repr=False)
    context: Any = field(repr=False)

    @classmethod
    def of(cls, dims: ParallelDims, device: str, timeout: timedelta | None = None) -> "Mesh":
        """Make the groups; every rank must call.

        Args:
            dims: of `of_world`.
            device: type of device on which the ranks communicate, such as "cuda".
            timeout: how long a rank waits for the others of a group; None: torch's default.
        """
        ranks = torch.arange(dims.world, device="cpu").view(dims.replicate, dims.shard, dims.context, dims.tensor)
        sizes = {"replicate": dims.replicate, "shard": dims.shard * dims.context}
        if dims.tensor > 1:
            sizes["tensor"] = dims.tensor
        device_mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        loss = _own_group(ranks.flatten(0, 2).mT) if dims.tensor > 1 else None
        context = _own_group(ranks.mT.reshape(-1, dims.context)) if dims.context > 1 else None
        if timeout is not None:  # torch gives it to the default group only
            for group in (*device_mesh.get_all_groups(), loss, context):
                if group is not None:
                    group.set_timeout(timeout)
        return cls(dims, device_mesh, loss, context)

    @cached_property
    def weights(self) -> DeviceMesh:
        """The part over which FSDP2 shards: one axis, or with replicas two."""
        return self.device_mesh["replicate", "shard"] if self.dims.replicate > 1 else self.device_mesh["shard"]

    @cached_property
    def tensor(self) -> DeviceMesh:
        """The axis over which matrices are divided; only with tensor ranks."""
        return self.device_mesh["tensor"]


def _own_group(ranks: torch.Tensor) -> Any:
    """Make a group of each row of `ranks`, and give that of this rank."""
    return dist.new_subgroups_by_enumeration(ranks.tolist())[0]
