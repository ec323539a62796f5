"""The tokens and samples of a micro-batch, and their FLOPs: given by the user, known by the module, or counted once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks.accounting.flop_counting import CannotCount, FlopCounter, count_on_copy
from lightning_tricks.accounting.flops import Attention

_IDS = ("input_ids", "tokens")
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Flops = tuple[float, float]  # the model's, and the recomputed ones: nan where not known


@dataclasses.dataclass
class Contents:
    """Tokens and samples of a micro-batch.

    Args:
        tokens: their number, or a scalar on the device where padding is marked.
        positions: tokens with their padding; equal to `tokens` where that is a number.
        length: T, tokens in a row; 0 where not known.
        samples: length of the first dimension of the first tensor that has one.
    """

    tokens: Tensor | float
    positions: float
    length: int
    samples: int


def contents_of(module: Any, batch: Any) -> Contents:
    """Count a micro-batch of any type without reading a device, with the module's own `tokens_in(batch)` if it has one.

    Tokens are B * T of the first tensor that is named `input_ids` or `tokens`, else of the first of integers (B, T),
    else of the first of floats (B, T, D); or the ones in an integer `attention_mask` (B, T). Where the first tensor is
    an image, (B, C, H, W), only names count: integers beside it are labels.
    """
    tensors = list(_tensors(batch))
    rows, length = _token_shape(tensors)
    own = getattr(module, "tokens_in", None)
    tokens = own(batch) if callable(own) else _count_tokens(tensors, rows, length)
    positions = rows * length if isinstance(tokens, Tensor) else tokens
    samples = next((tensor.shape[0] for _, tensor in tensors if tensor.dim()), 0)
    return Contents(tokens, positions, length, samples)


def _tensors(batch: Any, name: Any = None) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor in dicts, lists, tuples and dataclasses with its key or field, depth first."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        parts = zip(batch._fields, batch, strict=True)
    elif isinstance(batch, list | tuple):
        parts = ((name, value) for value in batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = ((field.name, getattr(batch, field.name, None)) for field in dataclasses.fields(batch))
    for key, value in parts:
        yield from _tensors(value, key)


def _token_shape(tensors: list[tuple[Any, Tensor]]) -> tuple[int, int]:
    """(B, T) of the batch's tokens; (0, 0) where it has none, as images with their labels."""
    found = [tensor for name, tensor in tensors if name in _IDS and tensor.dim() >= 2]
    if not found and tensors and tensors[0][1].dim() <= 3:
        integers = [tensor for _, tensor in tensors if tensor.dim() == 2 and _is_integer(tensor)]
        found = integers or [tensor for _, tensor in tensors if tensor.dim() == 3 and tensor.is_floating_point()]
    return (found[0].shape[0], found[0].shape[1]) if found else (0, 0)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _count_tokens(tensors: list[tuple[Any, Tensor]], rows: int, length: int) -> Tensor | int:
    for name, tensor in tensors:
        if rows and name == "attention_mask" and tensor.shape == (rows, length) and not tensor.is_floating_point():
            return tensor.sum()
    return rows * length


@dataclasses.dataclass
class BatchFlops:
    """FLOPs by the token or by the sample, and where the figure comes from.

    Args:
        unit: `token` counts positions, padding included.
        of_one: FLOPs of one unit in a row of that length.
        origin: one line of text.
    """

    unit: Literal["token", "sample"]
    of_one: Callable[[int], Flops]
    origin: str

    def __call__(self, contents: Contents) -> Flops:
        """FLOPs of a whole micro-batch."""
        count = contents.positions if self.unit == "token" else contents.samples
        model, recompute = self.of_one(contents.length)
        return count * model, count * recompute


def find_batch_flops(
    module: Any, batch: Any, per_token: float | None, per_sample: float | None, attention: Attention, trainer: Any
) -> BatchFlops:
    """The options first, then the module's `flops_per_token(seq_len, attention)`, then a count on a copy.

    Raises:
        UsageError: `flops_per_token` is given, but the batch has no tokens.
        CannotCount: the step cannot be run on a copy, see `count_flops`.
    """
    contents = contents_of(module, batch)
    if per_token is not None:
        if not contents.positions:
            raise UsageError(
                f"flops_per_token={per_token:g}: no tokens were found in the batch; give flops_per_sample, "
                "or the module a method tokens_in(batch)"
            )
        return _constant("token", (per_token, math.nan), "given")
    if per_sample is not None:
        return _constant("sample", (per_sample, math.nan), "given")
    own = getattr(module, "flops_per_token", None)
    if callable(own) and contents.length:
        of_one = functools.cache(lambda length: own(length, attention))
        return BatchFlops("token", of_one, _line("token", of_one(contents.length)[0], f"{attention} attention"))
    return flops_of_batch(count_on_copy(module, batch, trainer, trainer.precision_plugin.train_step_context), contents)


def flops_of_batch(counter: FlopCounter, contents: Contents, copies: int = 1) -> BatchFlops:
    """The FLOPs that were counted on one batch, for all others: by the token, or by the sample where it has no tokens.

    Args:
        counter: the one that counted the batch.
        contents: of that batch.
        copies: ranks that share the work on it, each of which counted its own share.

    Raises:
        CannotCount: not everything could be counted, or the batch holds neither tokens nor samples.
    """
    model, recompute = counter.flops
    if not (contents.positions or contents.samples):
        raise CannotCount("the batch holds no tensors before the step")
    count = contents.positions or contents.samples
    how = "counted on the first batch, attention in full"
    for name, part in counter.uncounted.items():
        how += f", without {name} in {part}"
    return _constant(
        "token" if contents.positions else "sample", (copies * model / count, copies * recompute / count), how
    )


def _constant(unit: Literal["token", "sample"], flops: Flops, how: str) -> BatchFlops:
    return BatchFlops(unit, lambda length: flops, _line(unit, flops[0], how))


def _line(unit: str, flops: float, how: str) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _SI if flops >= scale), (1.0, ""))
    return f"{flops / scale:.3g} {prefix}FLOP a {unit} ({how})"
