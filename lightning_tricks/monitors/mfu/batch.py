"""How many tokens and samples a batch holds, whatever the batch is, without reading a device."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_IDS = ("input_ids", "tokens")


Named = list[tuple[Any, Tensor]]  # tensors with the keys that they stand under, in their order


def tensors_of(batch: Any) -> Named:
    """Every tensor in dicts, lists, tuples and dataclasses, however deep."""
    return list(_tensors(batch))


def token_shape(tensors: Named) -> tuple[int, int] | None:
    """(B, T) of the batch's tokens; None where it has none, as images with their labels.

    A tensor named `input_ids` or `tokens` counts, else the first of integers (B, T), else the first of floats
    (B, T, D). Where the first tensor is an image, (B, C, H, W), only names count: integers beside it are labels.
    """
    image = bool(tensors) and tensors[0][1].dim() > 3
    found, rank = None, 3
    for name, tensor in tensors:
        if name in _IDS and tensor.dim() >= 2:
            return tensor.shape[0], tensor.shape[1]
        if image:
            continue
        if rank > 1 and tensor.dim() == 2 and _is_integer(tensor):
            found, rank = tensor, 1
        elif rank > 2 and tensor.dim() == 3 and tensor.is_floating_point():
            found, rank = tensor, 2
    return None if found is None else (found.shape[0], found.shape[1])


def tokens_in(batch: Any) -> int | Tensor:
    """Tokens in a batch: B * T of `token_shape`, or the ones in `attention_mask` where padding is marked; 0 if none.

    Returns:
        A number, or a scalar tensor on the batch's device.
    """
    tensors = tensors_of(batch)
    return count_tokens(tensors, token_shape(tensors))


def count_tokens(tensors: Named, shape: tuple[int, int] | None) -> int | Tensor:
    """`tokens_in` of a batch with these tensors."""
    if shape is None:
        return 0
    for name, tensor in tensors:
        if name == "attention_mask" and tuple(tensor.shape) == shape and not tensor.is_floating_point():
            return tensor.sum()
    return shape[0] * shape[1]


def samples_in(tensors: Named) -> int:
    """Length of the first dimension of the first tensor that has one; 0 if none has."""
    return next((tensor.shape[0] for _, tensor in tensors if tensor.dim()), 0)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _tensors(batch: Any, name: Any = None) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor with the key or field it stands under, depth first."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, key)
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        for field, value in zip(batch._fields, batch, strict=True):
            yield from _tensors(value, field)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value, name)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, field.name, None), field.name)
