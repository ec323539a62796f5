"""A model on paper of a step's time on many GPUs: computation, what is sent over which link, and what hides it.

It is a model, no measurement: benchmarks/plan_published.py compares it with published rows and states its error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.parallel.parallelize import Traffic

EFFICIENCY = 0.8  # of a link's datasheet figure that large collectives reach, as measured with NCCL on A100 (300 GB/s)
SOURCE = "https://github.com/stas00/ml-engineering/blob/master/network/README.md"


@dataclass(frozen=True)
class Links:
    """Speeds between GPUs.

    Attributes:
        host_gb: GB/s of a GPU to the others of its host, one direction.
        network_gb: GB/s of a GPU to those of other hosts, one direction.
        devices: GPUs of a host.
    """

    host_gb: float
    network_gb: float
    devices: int

    def is_on_network(self, dims: ParallelDims, axis: str) -> bool:
        """Whether the ranks of an axis lie on several hosts. Tensor ranks are neighbours, replicas farthest apart."""
        ranks, stride = dims.group(axis)
        return ranks > 1 and stride * ranks > self.devices

    def speed(self, dims: ParallelDims, axis: str) -> float:
        """GB/s at which a GPU gets what an axis sends.

        A ring passes through all GPUs of a host and crosses its border once. NCCL builds as many rings as the group has
        GPUs, and so network cards, in a host, each with its part of the bytes: a host gets these bytes once, over all
        of these cards, and its GPUs pass them on over the links within it. The slower one of both counts.

        Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (bus bandwidth).
        """
        if not self.is_on_network(dims, axis):
            return self.host_gb
        _, stride = dims.group(axis)
        return min(self.host_gb, max(1, self.devices // stride) * self.network_gb)

    def seconds(self, dims: ParallelDims, one: Traffic, tokens: int) -> float:
        """Time of what an axis sends in a micro-batch, if nothing else ran."""
        return one.bytes(tokens) / (EFFICIENCY * self.speed(dims, one.axis) * 1e9)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: of all micro-batches.
        sends: of each axis, if nothing else ran.
        total: with what computation hides taken off.
    """

    compute: float
    sends: dict[str, float]
    total: float


def step_time(
    compute: float, micro_batches: int, tokens: int, dims: ParallelDims, sends: Sequence[Traffic], links: Links
) -> StepTime:
    """Time of a step on a mesh.

    Weights and gradients are sent while the next or last block computes: only what takes longer than the computation
    shows. Ranks wait for activations in the middle of a block, so their time is added. Replicas send in each
    micro-batch unless gradients wait.

    Args:
        compute: seconds of computation in a micro-batch on one GPU.
        micro_batches: of a step.
        tokens: of a micro-batch on one rank.
        dims: sizes of the mesh.
        sends: of a micro-batch.
        links: their speeds.
    """
    times = {one.axis: links.seconds(dims, one, tokens) for one in sends}
    waits = sum(times[one.axis] for one in sends if one.per_token)
    hidden = sum(times.values()) - waits
    micro_batch = waits + max(compute, hidden)
    return StepTime(
        micro_batches * compute, {axis: micro_batches * t for axis, t in times.items()}, micro_batches * micro_batch
    )
