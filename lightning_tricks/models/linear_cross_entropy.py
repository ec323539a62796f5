"""Output head and cross-entropy together, for a slice of tokens at a time: the full logits never exist.

At vocabulary 50304 and 65536 tokens the logits and their gradient alone would take 26 GB in fp32.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_tricks._core.tensors import matmul_dtype, refuse_second_derivative
from lightning_tricks.parallel.tensor import local_rows

ROWS_ON_CPU = 256  # tokens in a slice, which the cache holds
ROWS = 8192  # on other devices


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Bound logits by cap * tanh(logits / cap), in fp32, as 16 bits have few values near the cap; None: no bound."""
    return logits if cap is None else cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float)) / cap)


def nats_and_gradient(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    group: Any = None,
    first: int = 0,
    each: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    wants_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Sum of cross-entropies of (N, V) logits with (N,) labels, and its gradient with respect to the logits, in fp32.

    Logits that are fp32 already are overwritten. Where the ranks of `group` have parts of the vocabulary, the logits
    and their gradient are those of this rank's part, which begins at token `first`; the sum is the same on all.
    The summands are written to `each`, (N,) fp32. `softcap` is of `softcapped`; its gradient takes one more tensor. The
    gradient is that of the sum plus `z_loss` times the sum of log(Z)^2, where Z is the sum of exp(logits).
    """
    counted = labels != ignore_index
    target = torch.where(counted, labels, 0).unsqueeze(1) - first
    z = logits.float()  # everything below is in place, so that a slice stays in the cache
    slope = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        slope = torch.addcmul(z.new_ones(()), z, z, value=-1) if wants_gradient else None
        z.mul_(softcap)
    largest = z.amax(1, keepdim=True)
    if group is None:
        is_here = counted
    else:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        is_here = counted & (target >= 0).squeeze(1) & (target < z.shape[1]).squeeze(1)
        target = torch.where(is_here.unsqueeze(1), target, 0)
    z.sub_(largest)
    at_target = z.gather(1, target).squeeze(1)
    z.exp_()
    total = z.sum(1)
    if group is not None:
        sums = torch.stack((total, torch.where(is_here, at_target, 0.0)))
        dist.all_reduce(sums, group=group)
        total, at_target = sums
    log_total = total.log()
    nats = torch.where(counted, log_total - at_target, 0.0)
    if each is not None:
        each.copy_(nats)
    if not wants_gradient:
        return nats.sum(), None
    factor = counted / total
    if z_loss:
        factor *= 1 + 2 * z_loss * (log_total + largest.squeeze(1))
    z.mul_(factor.unsqueeze(1))
    z.scatter_add_(1, target, -is_here.to(z.dtype).unsqueeze(1))
    return nats.sum(), z if slope is None else z.mul_(slope)


def for_the_compiler(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    wants_gradient: bool,
    each: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """`nats_and_gradient` of one rank, the gradient in the dtype of the logits: the compiler makes two kernels of it.

    Nothing of the logits' size is stored but the gradient. Without the compiler it takes several such tensors.
    """
    counted = labels != ignore_index
    target = torch.where(counted, labels, 0).unsqueeze(1)
    capped = softcapped(logits.float(), softcap)
    largest = capped.amax(1, keepdim=True)
    z = capped - largest
    total = z.exp().sum(1)
    log_total = total.log()
    summands = torch.where(counted, log_total - z.gather(1, target).squeeze(1), 0.0)
    if each is not None:
        each.copy_(summands)
    nats = summands.sum()
    if not wants_gradient:
        return nats, None
    factor = torch.where(counted, 1 / total, 0.0)
    if z_loss:
        factor = factor * (1 + 2 * z_loss * (log_total + largest.squeeze(1)))
    probability = z.exp() * factor.unsqueeze(1)
    is_label = (torch.arange(z.shape[1], device=z.device) == target) & counted.unsqueeze(1)
    gradient = torch.where(is_label, probability - 1, probability)
    if softcap is not None:
        gradient = gradient * (1 - (capped / softcap).square())
    return nats, gradient.to(logits.dtype)


@functools.cache
def _compiled() -> Any:
    return torch.compile(for_the_compiler)  # when first needed, as torch.compile imports much


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        rows: int,
        wants_gradient: bool,
        group: Any,
        first: int,
        compiled: bool,
        each: Tensor | None,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        head = weight.to(x.dtype)
        nats = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if wants_gradient else x
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else weight
        for begin in range(0, len(x), rows):
            piece = slice(begin, begin + rows)
            logits, of_piece = x[piece] @ head.T, None if each is None else each[piece]
            if compiled:
                how: Any = (wants_gradient, of_piece, softcap, z_loss)
                some_nats, grad_logits = _compiled()(logits, labels[piece], ignore_index, *how)
            else:
                how = (group, first, of_piece, softcap, z_loss, wants_gradient)
                some_nats, grad_logits = nats_and_gradient(logits, labels[piece], ignore_index, *how)
            nats += some_nats
            if grad_logits is not None:
                grad_logits = grad_logits.to(x.dtype)
                torch.mm(grad_logits, head, out=grad_x[piece])
                if x.dtype == grad_weight.dtype:
                    torch.addmm(grad_weight, grad_logits.T, x[piece], out=grad_weight)
                else:
                    grad_weight += grad_logits.T @ x[piece]
        if wants_gradient:
            ctx.save_for_backward(grad_x, grad_weight)
            ctx.weight_dtype = weight.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy", "take torch's cross_entropy of the logits")
        grad_x, grad_weight = ctx.saved_tensors
        # of one dimension, so that the product is computed in fp32: 1 / tokens in bf16 would be wrong by up to 0.4 %
        scaled = torch.mul(grad_x, grad.float().view(1), out=torch.empty_like(grad_x))
        return scaled, (grad_weight * grad).to(ctx.weight_dtype), *[None] * 10


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    rows: int | None = None,
    compiled: bool = False,
    each: Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum over tokens of -log softmax(x @ weight.T)[label], in nats.

    The forward pass computes the gradient too, slice by slice, so no logits are kept or computed twice. Products run
    in the dtype of `x`, or in autocast's; the softmax and the sums in fp32. It has no second derivative.

    Args:
        x: (N, d) features.
        weight: (V, d) of the output head; a DTensor where tensor ranks have parts of the vocabulary. Every one of them
            must call then, with the same `x`, and gets the whole sum, but the gradient of `x` that its part makes.
        labels: (N,) int64.
        ignore_index: label that does not count.
        rows: tokens in a slice. Default: `ROWS_ON_CPU`, `ROWS` elsewhere.
        compiled: run the softmax of a slice through `torch.compile` on CUDA, where no tensor ranks share the weight:
            a slice is then read and written once or twice, in place of a dozen times in fp32.
        each: (N,) fp32, to which the summands are written; it has no gradient.
        softcap: bounds the logits before the softmax: softcap * tanh(logits / softcap). None: they are as they are.
        z_loss: weight of log(Z)^2, summed over the tokens that count, where Z is the sum of exp(logits) of a token. The
            gradient has it in it, the value has not.

    Returns:
        Scalar fp32 tensor.

    Raises:
        UsageError: in a backward pass with `create_graph=True`.

    Source: Liger Kernel (Hsu et al. 2024), src/liger_kernel/ops/fused_linear_cross_entropy.py of
    https://github.com/linkedin/Liger-Kernel, which does the same in Triton; the cap: `final_logit_softcap` of
    https://github.com/google-deepmind/gemma/blob/main/gemma/gm/nn/_transformer.py; z-loss:
    https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/nn/functional/cross_entropy_loss.py.
    """
    rows = rows or (ROWS_ON_CPU if x.device.type == "cpu" else ROWS)
    # asked here: autograd turns gradients off within forward, and its `needs_input_grad` is true under `no_grad` too
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    weight, group, first = local_rows(weight)
    x = x.to(matmul_dtype(x))
    compiled = compiled and x.is_cuda and group is None
    options = (ignore_index, rows, wants_gradient, group, first, compiled, each, softcap, z_loss)
    return _LinearCrossEntropy.apply(x, weight, labels, *options)
