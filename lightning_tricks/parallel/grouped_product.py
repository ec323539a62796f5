"""The product of rows with the matrices of their experts, an operator of its own around torch's `grouped_mm`.

torch's operator has no shape function for fp32, so that neither `torch.compile` nor `plan`, which run without data,
could see through it. A name of its own also tells activation checkpointing which results are those of experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_tricks._core.tensors import refuse_second_derivative


@torch.library.custom_op("lightning_tricks::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`rows[i] @ weight[e].T`, where `e` is the expert of row i; no expert needs a row.

    Widths are multiples of 16 bytes. The documentation of `grouped_mm` promises bf16 on CUDA devices from Ampere on.

    Args:
        rows: (n, in), those of the first expert first; n may be 0.
        weight: (experts, out, in), in the dtype of the rows.
        ends: (experts,) int32, the number of rows of each expert and of those before it.

    Returns:
        (n, out).

    Source: https://docs.pytorch.org/docs/main/generated/torch.nn.functional.grouped_mm.html
    """
    if not len(rows):  # which torch refuses; an expert rank may get none
        return rows.new_empty(0, weight.shape[1])
    return F.grouped_mm(rows, weight.mT, offs=ends)


@torch.library.custom_op("lightning_tricks::grouped_product_backward", mutates_args=())
def grouped_product_backward(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weight."""
    if not len(rows):
        return torch.empty_like(rows), torch.zeros_like(weight)
    grad = grad.contiguous()  # torch refuses an expanded one, such as that of a sum
    return F.grouped_mm(grad, weight, offs=ends), F.grouped_mm(grad.mT, rows, offs=ends)


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_product_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    refuse_second_derivative("a product of experts", "train without it")
    return *grouped_product_backward(grad, *ctx.saved_tensors), None


grouped_product.register_autograd(_backward, setup_context=_setup)
