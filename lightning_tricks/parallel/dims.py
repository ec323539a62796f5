"""Sizes of a mesh by name, and which ranks share data, loss and weights; `Mesh` makes their process groups."""

import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_tricks._core.errors import UsageError, check_count

__all__ = ["ParallelDims"]

# the axes of the world from outside to inside: the ranks of the last one are neighbours, on the fastest links
_ORDER = ("pipeline", "replicate", "shard", "context", "tensor")
_OWN_ROWS = ("replicate", "shard")  # ranks that differ along these have rows of their own
_OWN_TOKENS = ("replicate", "shard", "context")  # and along these tokens of their own


@dataclass(frozen=True)
class ParallelDims:
    """Into how many parts each axis of the work is divided; the product is the number of processes.

    Ranks count through the innermost axis first: tensor ranks are neighbours, on the fastest links; pipeline ranks are
    farthest apart, as they send least.
    `rank = (((pipeline * replicas + replicate) * shards + shard) * contexts + context) * tensors + tensor`.

    Args:
        pipeline: parts of the model by depth: each rank has some of its layers, see `Pipeline`. These ranks have the
            same data.
        replicate: model replicas (HSDP); gradients are averaged between them.
        shard: parts of the weights of one replica, by FSDP2, each with rows of its own; -1: all processes that are
            left.
        context: parts of each sequence. FSDP2 divides the weights over these ranks too.
        tensor: parts of each layer's matrices. These ranks have the same data.
        expert: ranks that share the experts of a mixture among them; each has some, and tokens go to where theirs are.
            No further factor: these are neighbours among the shard x context ranks, whose number it divides.

    Raises:
        UsageError: a size that is no whole number of at least 1, or not -1 in `shard`; both expert and tensor ranks.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = -1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        for axis, size in {**self.sizes, "expert": self.expert}.items():
            if (axis, size) != ("shard", -1):
                check_count(f"mesh.{axis}", size, ", or -1 for all processes that are left" if axis == "shard" else "")
        if self.expert > 1 and self.tensor > 1:
            raise UsageError(
                f"mesh.expert={self.expert}: experts are not divided over tensor ranks too: leave mesh.tensor at 1"
            )

    def of_world(self, world: int) -> "ParallelDims":
        """The same sizes with `shard` known, for `world` processes.

        Raises:
            UsageError: the sizes do not multiply to `world`; `expert` does not divide shard x context.
        """
        given = math.prod(size for axis, size in self.sizes.items() if axis != "shard")
        shard = world // given if self.shard == -1 else self.shard
        if shard < 1 or given * shard != world:
            sizes = {axis: size for axis, size in self.sizes.items() if size != 1 and (axis, size) != ("shard", -1)}
            named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            verb = "does not divide" if self.shard == -1 else "does not make"
            raise UsageError(
                f"mesh: {named or 'shard 1'} {verb} the {world} devices: the sizes must multiply to num_nodes x devices"
            )
        if shard * self.context % self.expert:
            raise UsageError(
                f"mesh.expert={self.expert} does not divide the {shard * self.context} ranks of shard {shard} x "
                f"context {self.context}, among which experts are shared out: take another size"
            )
        return replace(self, shard=shard)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, from outside to inside."""
        return {axis: getattr(self, axis) for axis in _ORDER}

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Number of processes that see different rows."""
        return math.prod(self.sizes[axis] for axis in _OWN_ROWS)

    @property
    def loss_ranks(self) -> int:
        """Number of processes that see different tokens: over these a loss is averaged, and so are gradients."""
        return math.prod(self.sizes[axis] for axis in _OWN_TOKENS)

    def stride(self, axis: str) -> int:
        """How far two neighbours of an axis are apart in the world."""
        inside = _ORDER[_ORDER.index(axis) + 1 :]
        return math.prod(self.sizes[other] for other in inside)

    def group(self, axis: str) -> tuple[int, int]:
        """Number of ranks that send along an axis, and their stride; weights are divided over context ranks too.

        Of these shard ranks, neighbours along `expert` have different experts, and those along `rest` the same ones.
        """
        if axis == "expert":
            return self.expert, self.stride("context")
        if axis == "rest":
            return self.shard * self.context // self.expert, self.expert * self.stride("context")
        context = self.context if axis == "shard" else 1
        return self.sizes[axis] * context, self.stride(axis) // context

    def place(self, rank: int, *axes: str) -> int:
        """Place of a process among those that differ from it along `axes` alone, given from outside to inside."""
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + rank // self.stride(axis) % self.sizes[axis]
        return place

    def data_rank(self, rank: int) -> int:
        """Place of a process among the `data_ranks`; its neighbours along context and tensor have the same rows."""
        return self.place(rank, *_OWN_ROWS)

    def random_rank(self, rank: int) -> int:
        """Process whose random numbers a process draws: tensor ranks have the same activations, and drop the same."""
        return rank - self.place(rank, "tensor") * self.stride("tensor")

    def __str__(self) -> str:
        """Such as `replicate 2 x shard 4 x tensor 2`; axes of one part are left out, but for the shards."""
        named = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size != 1 or axis == "shard")
        return named if self.expert == 1 else f"{named}, expert {self.expert}"


@dataclass(frozen=True)
class Mesh:
    """The process groups of a run, by what their ranks share. The default process group must exist.

    Attributes:
        dims: sizes, of the whole world.
        device_mesh: axes `replicate`, `shard` (x context) and, if there are such ranks, `pipeline` and `tensor`, as
            FSDP2 and DTensor take it.
        loss: group of the ranks that have different tokens, of which this rank is one; None: all ranks.
        context: group of the ranks that have the other parts of this rank's rows; None where rows are whole.
        ends: group of the first and the last pipeline rank, of which this rank is one; None on the ranks between.
        stage: group of the ranks that have the same layers as this one; None: all ranks.
        experts: the same ranks with the axes `rest` and `expert` in place of `shard`; None without expert ranks.
    """

    dims: ParallelDims
    device_mesh: DeviceMesh
    loss: Any = field(repr=False)
    context: Any = field(repr=False)
    ends: Any = field(repr=False, default=None)
    stage: Any = field(repr=False, default=None)
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, dims: ParallelDims, device: str, timeout: timedelta | None = None) -> "Mesh":
        """Make the groups; every rank must call.

        Args:
            dims: of `of_world`.
            device: type of device on which the ranks communicate, such as "cuda".
            timeout: how long a rank waits for the others of a group; None: torch's default.
        """
        sizes = {"pipeline": dims.pipeline} if dims.pipeline > 1 else {}
        sizes |= {"replicate": dims.replicate, "shard": dims.shard * dims.context}
        if dims.tensor > 1:
            sizes["tensor"] = dims.tensor
        device_mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        experts = None
        if dims.expert > 1:
            del sizes["shard"]
            sizes |= {"rest": dims.group("rest")[0], "expert": dims.expert}
            experts = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        loss = _own_group(dims, *_OWN_TOKENS) if dims.loss_ranks < dims.world else None
        context = _own_group(dims, "context") if dims.context > 1 else None
        ends = stage = None
        if dims.pipeline > 1:
            stage = _own_group(dims, *_ORDER[1:])
            first = torch.arange(dims.stride("pipeline"), device="cpu")
            last = first + (dims.pipeline - 1) * len(first)
            ends = dist.new_subgroups_by_enumeration(torch.stack([first, last], dim=1).tolist())[0]
        if timeout is not None:  # torch gives it to the default group only
            of_experts = () if experts is None else experts.get_all_groups()
            for group in (*device_mesh.get_all_groups(), *of_experts, loss, context, ends, stage):
                if group is not None:
                    group.set_timeout(timeout)
        return cls(dims, device_mesh, loss, context, ends, stage, experts)

    @cached_property
    def weights(self) -> DeviceMesh:
        """The part over which FSDP2 shards: one axis, or with replicas two."""
        return self.device_mesh["replicate", "shard"] if self.dims.replicate > 1 else self.device_mesh["shard"]

    @cached_property
    def rest(self) -> DeviceMesh:
        """The part over which FSDP2 shards experts, as `weights`; only with expert ranks."""
        assert self.experts is not None
        return self.experts["replicate", "rest"] if self.dims.replicate > 1 else self.experts["rest"]

    @cached_property
    def tensor(self) -> DeviceMesh:
        """The axis over which matrices are divided; only with tensor ranks."""
        return self.device_mesh["tensor"]

    @cached_property
    def pipeline(self) -> Any:
        """The process group of the ranks that have the other layers of this rank's model; only with pipeline ranks."""
        return self.device_mesh["pipeline"].get_group()


def _own_group(dims: ParallelDims, *axes: str) -> Any:
    """The process group of the ranks that differ from this one along `axes` alone; every rank must call."""
    ranks = torch.arange(dims.world, device="cpu").view(*dims.sizes.values())
    order = sorted(range(len(_ORDER)), key=lambda number: _ORDER[number] in axes)  # the group's own axes last
    rows = ranks.permute(order).reshape(-1, math.prod(dims.sizes[axis] for axis in axes))
    return dist.new_subgroups_by_enumeration(rows.tolist())[0]
