"""A mixture of experts in place of a block's MLP: the router, the experts' products, and what keeps the loads even.

No token is dropped and no expert has a capacity. Losses are sums over tokens and rows, counts are made in the backward
pass: so micro-batches, ranks and activation checkpointing change neither gradients nor loads. Imports torch only.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tricks._core.tensors import autocasts, local
from lightning_tricks.models.decoder_config import Llama
from lightning_tricks.models.fused_linear import Fused
from lightning_tricks.parallel.experts import ExpertExchange, Permute
from lightning_tricks.parallel.grouped_product import grouped_product


class Router(nn.Module):
    """Chooses the experts of each token, and their weights, in fp32 also where autocast or FSDP2 casts.

    The scores are a softmax or sigmoids of the logits. The `bias` of `balance: bias` is added to the scores where
    experts are chosen, and not in the weights; no gradient reaches it, `move_bias` moves it.

    Attributes:
        backward_loads: one tensor of `Mixture.forward` for each backward pass since the last step. No buffer: those are
            copied from rank to rank by DDP, and saved.

    Source: `DeepseekV3TopkRouter` in
        https://github.com/huggingface/transformers/blob/main/src/transformers/models/deepseek_v3/modeling_deepseek_v3.py,
        with groups; Mixtral's, OLMoE's and Qwen3-MoE's are softmax routers without bias, groups and scale.
    """

    stays_fp32 = True  # for `bound_to_buffers`
    bias: Tensor | None

    def __init__(self, config: Llama) -> None:
        super().__init__()
        assert config.n_experts is not None
        self.config, self.n_experts = config, config.n_experts
        self.weight = nn.Parameter(torch.empty(self.n_experts, config.d_model))
        self.register_buffer("bias", torch.zeros(self.n_experts) if config.balance == "bias" else None)
        self.backward_loads: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of tokens (n, d_model): weights and numbers of experts (n, experts_per_token), logits and scores (n, E)."""
        kind, config = x.device.type, self.config
        with torch.autocast(kind, enabled=False) if autocasts(kind) else nullcontext():
            logits = F.linear(x.float(), self.weight.float())
            scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
            choice = scores.detach() if self.bias is None else scores.detach() + self.bias
            if config.router_groups > 1:
                groups = choice.unflatten(-1, (config.router_groups, -1))
                best = groups.topk(2, dim=-1).values.sum(-1).topk(config.groups_per_token, dim=-1).indices
                left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
                choice = groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
            chosen = choice.topk(config.experts_per_token, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if config.normalize_router:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights * config.router_scale, chosen, logits, scores

    @torch.no_grad()
    def move_bias(self, counts: Tensor, moves: Tensor | float = 1.0) -> None:
        """Raise the bias of experts with fewer tokens than the mean by `balance_rate`, lower that of the others.

        Args:
            counts: (E,) tokens of each expert in a step, of all ranks.
            moves: 0 for a step that is skipped, else 1.

        Source: Wang et al. 2024, https://arxiv.org/abs/2408.15664. torchtitan (`torchtitan/components/optimizer.py`,
            https://github.com/pytorch/torchtitan) moves it so too, and then subtracts the mean, which chooses the same.
        """
        if self.bias is not None:
            self.bias += self.config.balance_rate * moves * (counts.mean() - counts).sign()


class Experts(nn.Module):
    """Gated MLPs side by side, weights (E, out, in): each matrix is like that of an `nn.Linear`."""

    is_transposed = False  # for `layout_of`: (experts, out, in)

    def __init__(self, n_experts: int, d_model: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, width, d_model))
        self.up = nn.Parameter(torch.empty(n_experts, width, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, width))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (n, d_model) in the order of their experts to the same; `ends` (E,) int32 are the experts' last rows."""
        gate, up, down = (local(weight).to(rows.dtype) for weight in (self.gate, self.up, self.down))
        hidden = F.silu(grouped_product(rows, gate, ends)) * grouped_product(rows, up, ends)
        return grouped_product(hidden, down, ends)


class _Dispatch(torch.autograd.Function):
    """A copy of each token for each of its experts, in their order; the backward pass gathers too, and adds nothing up
    in an order that differs from run to run, as that of `x[index]` does on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Mixture(nn.Module):
    """The feed-forward half of a block: each token goes through some of the experts, and all go through `shared`.

    Attributes:
        exchange: with expert ranks, what calls the experts of all of them.
    """

    def __init__(self, config: Llama, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(self.router.n_experts, config.d_model, config.expert_width)
        self.shared = shared
        self.exchange: ExpertExchange | None = None

    def forward(self, x: Tensor, fused: Fused = None) -> tuple[Tensor, Tensor, Tensor]:
        """Map (batch, length, d_model) to the same shape, with a loss and the loads; `fused` is that of `shared`.

        Returns:
            the outputs; the loss in nats, summed over tokens, which adds to the cross-entropy (0 in evaluation); the
            loads (E + 2,) fp32 without a gradient: tokens of each expert, the sum of the router's entropies in nats,
            its largest logit.
        """
        flat = x.flatten(0, 1)
        weights, chosen, logits, scores = self.router(flat)
        # before the experts: a block that runs again ends with the last result that its backward pass needs
        loss = self._loss(logits, scores, chosen, x.shape[0])
        by_expert, order = chosen.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        numbers = torch.arange(self.router.n_experts, device=x.device)
        ends = torch.searchsorted(by_expert, numbers, right=True).int()  # where `bincount` would wait for the device
        copies = chosen.shape[-1]
        rows = _Dispatch.apply(flat, order, inverse, copies)
        rows = self.experts(rows, ends) if self.exchange is None else self.exchange(rows, ends, self.experts)
        rows = Permute.apply(rows, inverse, order).unflatten(0, (-1, copies))
        out = (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1)
        if self.shared is not None:
            out = out + self.shared(flat, fused)
        return out.view_as(x), loss, _loads(logits, scores, ends)

    def sent_between_expert_ranks(self) -> int:
        """Elements of the rows that are sent for a token: each of its experts gets one, and sends one back."""
        return 2 * self.router.config.experts_per_token * self.router.config.d_model

    def _loss(self, logits: Tensor, scores: Tensor, chosen: Tensor, rows: int) -> Tensor:
        """Sums, not means: then any division into micro-batches and ranks has the gradient of the whole batch.

        Source: the sequence-wise loss is that of DeepSeek-V3, https://arxiv.org/abs/2412.19437, for each token of the
            row; z-loss of routers: Zoph et al. 2022, https://arxiv.org/abs/2202.08906.
        """
        config, total = self.router.config, logits.new_zeros(())
        if self.training and config.router_z_weight:
            total = total + config.router_z_weight * logits.logsumexp(-1).square().sum()
        if self.training and config.sequence_balance_weight:
            n_experts, of_row = logits.shape[-1], chosen.view(rows, -1)
            ones = torch.ones_like(of_row, dtype=logits.dtype)
            counts = logits.new_zeros(rows, n_experts).scatter_add_(1, of_row, ones)
            load = counts * (n_experts / of_row.shape[1])  # 1 for each expert where all have equally many
            share = (scores / scores.sum(-1, keepdim=True)).view(rows, -1, n_experts).sum(1)
            total = total + config.sequence_balance_weight * (load * share).sum()
        return total


@torch.no_grad()
def _loads(logits: Tensor, scores: Tensor, ends: Tensor) -> Tensor:
    """See `Mixture.forward`."""
    counts = ends.diff(prepend=ends.new_zeros(1)).float()
    shares = scores / scores.sum(-1, keepdim=True)
    return torch.cat((counts, torch.special.entr(shares).sum().view(1), logits.amax().view(1)))


@torch.compiler.disable
def count_in_backward(x: Tensor, loads: Sequence[tuple[Router, Tensor]]) -> None:
    """Let the backward pass of `x`, the output of a block, add loads to the `backward_loads` of their routers.

    Called outside of the block: so activation checkpointing, which runs the block twice, counts once, and a validation,
    which has no backward pass, counts nothing.
    """

    def add(_: Tensor) -> None:  # gives None, and so changes no gradient
        for router, load in loads:
            router.backward_loads.append(load)

    x.register_hook(add)


def take_loads(routers: list[Router]) -> Tensor | None:
    """The loads of all backward passes since the last call: (layers, E + 2), as `Mixture.forward` has them.

    None where there was no backward pass.
    """
    loads = [torch.stack(router.backward_loads) for router in routers if router.backward_loads]
    for router in routers:
        router.backward_loads.clear()
    if not loads:
        return None
    each = torch.stack(loads)  # layers, passes, E + 2
    return torch.cat((each[..., :-1].sum(1), each[..., -1:].amax(1)), dim=-1)
