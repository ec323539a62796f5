"""One matrix product for several linear layers of one input; their weights stay parameters of their own."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from lightning_tricks._core.tensors import autocasts, matmul_dtype

# How often a fused product is computed: again in the backward pass, where activation checkpointing does. None: single.
Fused = Literal["once", "run again"] | None


class _Product(torch.autograd.Function):
    """Keeps the weights and not their copy, which the backward pass makes again: FSDP2 frees its gathered weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters[:count])
        return _product(x, count, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        sizes, rows, (of_x, _, *of_others) = [*map(len, weights)], grad.flatten(0, -2), ctx.needs_input_grad
        # of another shape than in the forward pass: torch.compile would take the two for one, and keep it
        copy = torch.cat([weight.unsqueeze(-1) for weight in weights]).squeeze(-1)
        others = (rows.mT @ x.flatten(0, -2)).split(sizes) if of_others[0] else [None] * len(sizes)
        biases = rows.sum(0).split(sizes) if of_others[len(sizes) :] else ()
        return grad @ copy if of_x else None, None, *others, *biases


def _product(x: Tensor, count: int, *parameters: Tensor) -> Tensor:
    """`F.linear` with the weights, and the biases that may follow them, one below the other."""
    return F.linear(x, torch.cat(parameters[:count]), torch.cat(parameters[count:]) if parameters[count:] else None)


def can_multiply_together(layers: Sequence[nn.Linear]) -> bool:
    """Whether the calls of the layers are products and nothing else, so that one product may replace them.

    Not so for hooks (those by which tensor ranks divide the layer excepted), a `forward` of the object, a class that is
    not nn.Linear and has no `multiply_together`, layers that differ in class or bias, and some frozen ones of several.
    """
    first = layers[0]
    divided = isinstance(first._parameters.get("weight"), DTensor)
    if type(first) is not nn.Linear and (divided or not hasattr(first, "multiply_together")):
        return False
    own = int(divided)  # one before and one after the call: see `parallel.tensor.divide`
    wanted = (type(first), own, own, 0, 0, False, None, first.weight.requires_grad, first.bias is None)
    return all(
        (
            type(layer), len(layer._forward_pre_hooks), len(layer._forward_hooks), len(layer._backward_pre_hooks),
            len(layer._backward_hooks), "forward" in vars(layer), layer._compiled_call_impl,
            layer.weight.requires_grad, layer.bias is None,
        ) == wanted
        for layer in layers
    )  # fmt: skip


def multiply(x: Tensor, layers: Sequence[nn.Linear], fused: Fused) -> tuple[Tensor, ...]:
    """The result of each layer for `x` (..., in_features), by one product if `fused` and `can_multiply_together`.

    The gradient of `x` is then one sum over all outputs, in place of the sum of a rounded product for each layer. An
    attribute `multiply_together` of the first layer, a function of `x` and the layers, takes the place of the product.
    """
    if fused is None:
        return tuple(layer(x) for layer in layers)
    if (own := getattr(layers[0], "multiply_together", None)) is not None:
        return cast(tuple[Tensor, ...], own(x, layers))
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers if layer.bias is not None)]
    if isinstance(x, DTensor):  # whole on every tensor rank, of which each has a part of the outputs
        x = x.to_local(grad_placements=[Partial()])
        # not by `tensors.local`, whose question torch.compile answers otherwise
        parameters = [cast(DTensor, parameter).to_local() for parameter in parameters]
    if autocasts(x.device.type):  # which would cast the copy, with more bytes to read and write
        x, *parameters = (tensor.to(matmul_dtype(x)) for tensor in (x, *parameters))
    # what runs again keeps nothing anyway, and compiled `full` does not see into a Function
    product = _Product.apply if fused == "once" else _product
    return product(x, len(layers), *parameters).split([len(each) for each in parameters[: len(layers)]], dim=-1)
