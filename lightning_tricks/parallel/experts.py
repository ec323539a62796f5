"""Experts on different ranks (expert parallelism): each has some of a mixture's experts, and tokens go there and back.

All but the experts is sharded as ever. The ranks that have the same experts shard these among them.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import HasExperts
from lightning_tricks.parallel.dims import Mesh
from lightning_tricks.parallel.tensor import distribute


class Permute(torch.autograd.Function):
    """`rows[order]` of a permutation and its inverse; the backward pass gathers too, where `rows[order]` adds up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Rows (n, ...), and permutations (n,)."""
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows."""
        return grad[ctx.saved_tensors[0]], None, None


class _Send(torch.autograd.Function):
    """Rows to the ranks of a group, `sends` and `gets` of each; the backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], gets: list[int], group: Any) -> Tensor:
        ctx.back = gets, sends, group
        found = rows.new_empty(sum(gets), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), gets, sends, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Send.apply(grad, *ctx.back), None, None, None


class ExpertExchange:
    """Calls the experts of all ranks of a group, of which each has as many, the first rank the first ones.

    Every rank must call, as often as the others; a rank may have no row, and its experts may get none.

    Args:
        group: process group of these ranks.

    Source: Lepikhin et al. 2020 (GShard), https://arxiv.org/abs/2006.16668, with the numbers of rows in place of a
        capacity.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    @torch.compiler.disable
    def __call__(self, rows: Tensor, ends: Tensor, experts: nn.Module) -> Tensor:
        """What `experts(rows, ends)` is where one rank has all experts.

        The host waits for the device once: memory for the rows of other ranks cannot be had before their number is
        known. Rows of an expert stand in the order of the ranks, so sums are the same in each run.

        Args:
            rows: (n, d_model), in the order of their experts.
            ends: (experts,) int32, the last rows of all experts.
            experts: this rank's.
        """
        sent = ends.diff(prepend=ends.new_zeros(1)).view(self.group.size(), -1)  # by rank and its experts
        got = torch.empty_like(sent)  # by rank and experts here
        dist.all_to_all_single(got, sent, group=self.group)
        sends, gets = _numbers(sent, got, len(rows))
        here = torch.arange(got.shape[1], device=rows.device).expand_as(got).flatten()
        order = here.repeat_interleave(got.flatten(), output_size=sum(gets)).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
        rows = Permute.apply(_Send.apply(rows, sends, gets, self.group), order, inverse)
        rows = experts(rows, got.sum(0).cumsum(0, dtype=torch.int32))
        return _Send.apply(Permute.apply(rows, inverse, order), gets, sends, self.group)


def _numbers(sent: Tensor, got: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank, on the host; without data, as many for each."""
    if isinstance(got, FakeTensor):
        even = [len(part) for part in torch.arange(rows, device="cpu").tensor_split(len(got))]
        return even, even
    sends, gets = torch.stack((sent.sum(1), got.sum(1))).tolist()
    return sends, gets


def mixtures_of(module: nn.Module) -> dict[str, Any]:
    """The parts that have experts, by name, see `HasExperts`."""
    return {name: part for name, part in module.named_modules() if isinstance(part, HasExperts)}


def check_experts(module: nn.Module, ranks: int) -> None:
    """Refuse a module whose experts cannot be shared out among so many ranks.

    Raises:
        UsageError: it has none, or their number is no multiple of the ranks.
    """
    mixtures = mixtures_of(module)
    if not mixtures:
        raise UsageError(
            f"mesh.expert={ranks}: the model has no mixture of experts to share out: leave mesh.expert at 1"
        )
    for name, part in mixtures.items():
        number = next(part.experts.parameters()).shape[0]
        if number % ranks:
            raise UsageError(
                f"mesh.expert={ranks}: the {number} experts of '{name}' are no multiple of it: take another"
            )


def divide_experts(module: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Leave each mixture this rank's experts, and let it send tokens to the others; returns the experts."""
    mixtures = mixtures_of(module).values()
    for part in mixtures:
        axis = mesh.experts["expert"]  # type: ignore[index]
        distribute(part.experts, axis, Shard(0))
        part.exchange = ExpertExchange(axis.get_group())
    return [part.experts for part in mixtures]


def shard_experts(experts: Any, mesh: Mesh, blocks: Iterable[nn.Module], **options: Any) -> None:
    """Shard this rank's experts over the ranks that have the same.

    A rank's experts get the rows of all expert ranks, so their gradient is a sum over these already, and is divided by
    the number of all ranks with tokens of their own, as other gradients are.

    They are gathered where their block is, and not within it: its gathering is then on its way before the host waits,
    and activation checkpointing, which counts the operations of a block in both runs, sees none of it. FSDP2 keeps the
    hooks in private fields, read from torch/distributed/fsdp/_fully_shard/_fsdp_state.py.

    Args:
        experts: of `divide_experts`.
        mesh: of the run.
        blocks: that FSDP2 gathers one at a time.
        options: of `fully_shard`.
    """
    ranks = mesh.dims.group("rest")[0]

    def dimension(weight: Any) -> Shard:
        _, outputs, _ = weight.shape
        own = weight.to_local().shape[0]
        return Shard(1 if own % ranks and outputs % ranks == 0 else 0)  # fewer experts than ranks: no padding

    fully_shard(experts, mesh=mesh.rest, shard_placement_fn=dimension, **options)
    experts.set_gradient_divide_factor(float(mesh.dims.loss_ranks))
    if ranks > 1:  # gloo has no sum with a factor; over one rank, torch 2.13 would divide twice with it
        experts.set_force_sum_reduction_for_comms(True)
    for block in blocks:
        if block is not experts and any(part is experts for part in block.modules()):
            state = experts._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            block.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            block.register_forward_hook(state._post_forward)
            return
