"""Count the tokens and samples of a micro-batch, and find their FLOPs: from the user, the module, or a count."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.protocols import KnowsFlops
from lightning_tricks.accounting.flop_counting import CannotCount, FlopCounter

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Flops = tuple[float, float]  # (the model's, the recomputed); nan where the second is not known


@dataclasses.dataclass
class Contents:
    """Tokens and samples of a micro-batch."""

    tokens: Tensor | float  # without padding; a scalar on the device if a mask marks padding
    positions: float  # with padding; equal to `tokens` if that is a number
    length: int  # T, tokens in a row; 0 where not known
    samples: int  # length of the first dimension of the first tensor that has one


def contents_of(module: Any, batch: Any) -> Contents:
    """Count a micro-batch of any type without reading a device, with the module's own `tokens_in(batch)` if it has one.

    The tokens are the B * T positions of the first tensor that is named `input_ids` or `tokens`, else of the first
    integer tensor (B, T), else of the first float tensor (B, T, D). If there is an integer `attention_mask` (B, T), its
    ones count instead. If the first tensor of the batch is an image, (B, C, H, W), only the names are looked at:
    integers beside an image are labels.
    """
    tensors = list(_tensors(batch))
    rows, length = _token_shape(tensors)
    own = getattr(module, "tokens_in", None)
    masks = [tensor for name, tensor in tensors if name == "attention_mask" and not tensor.is_floating_point()]
    mask = next((mask for mask in masks if rows and mask.shape == (rows, length)), None)
    tokens = own(batch) if callable(own) else rows * length if mask is None else mask.sum()
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
    found = [tensor for name, tensor in tensors if name in ("input_ids", "tokens") and tensor.dim() >= 2]
    if not found and tensors and tensors[0][1].dim() <= 3:
        integers = [tensor for _, tensor in tensors if tensor.dim() == 2 and tensor.dtype in _INTEGERS]
        found = integers or [tensor for _, tensor in tensors if tensor.dim() == 3 and tensor.is_floating_point()]
    return (found[0].shape[0], found[0].shape[1]) if found else (0, 0)


@dataclasses.dataclass
class BatchFlops:
    """FLOPs per token or per sample, and where the figure comes from."""

    unit: Literal["token", "sample"]  # a token may be padding
    of_one: Callable[[int], Flops]  # FLOPs of one unit in a row of the given length
    origin: str  # one line for the log
    passes: int = 0  # backward passes of a micro-batch that the figure stands for; 0: however many there are

    def __call__(self, contents: Contents, passes: int) -> Flops:
        """FLOPs of a whole micro-batch with so many backward passes."""
        count = contents.positions if self.unit == "token" else contents.samples
        times = count * (passes / self.passes if self.passes else 1)
        model, recompute = self.of_one(contents.length)
        return times * model, times * recompute


def known_batch_flops(
    module: Any, contents: Contents, per_token: float | None, per_sample: float | None, attention: str
) -> BatchFlops | None:
    """The FLOPs by the options, else by the module's `flops_per_token(seq_len, attention)`; None without either.

    Raises:
        UsageError: `flops_per_token` is given, but the batch has no tokens.
    """
    if per_token is not None:
        if not contents.positions:
            raise UsageError(
                f"flops_per_token={per_token:g}: no tokens were found in the batch; give flops_per_sample, "
                "or the module a method tokens_in(batch)"
            )
        return _constant("token", (per_token, math.nan), "given")
    if per_sample is not None:
        return _constant("sample", (per_sample, math.nan), "given")
    if isinstance(module, KnowsFlops) and callable(module.flops_per_token) and contents.length:
        of_one = functools.cache(lambda length: module.flops_per_token(length, attention))
        return BatchFlops("token", of_one, _line("token", of_one(contents.length)[0], f"{attention} attention"))
    return None


def flops_of_batch(counter: FlopCounter, contents: Contents, passes: int, copies: int = 1) -> BatchFlops:
    """The FLOPs per token that were counted on one batch, or per sample if it has no tokens, to use for all batches.

    Args:
        counter: after the step.
        contents: of the batch.
        passes: backward passes in that batch; 0 where not known.
        copies: number of ranks that share the work on the batch; each has counted its own part.

    Raises:
        CannotCount: not everything could be counted, or the batch holds neither tokens nor samples.
    """
    model, recompute = counter.flops
    count = contents.positions or contents.samples
    if not count:
        raise CannotCount("the batch holds no tensors before the step")
    flops = copies * model / count, copies * recompute / count
    missing = "".join(f", without {name} in {part}" for name, part in counter.uncounted.items())
    how = f"counted on the first batch, attention in full{missing}"
    return _constant("token" if contents.positions else "sample", flops, how, passes)


def _constant(unit: Literal["token", "sample"], flops: Flops, how: str, passes: int = 0) -> BatchFlops:
    return BatchFlops(unit, lambda length: flops, _line(unit, flops[0], how), passes)


def _line(unit: str, flops: float, how: str) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _SI if flops >= scale), (1.0, ""))
    return f"{flops / scale:.3g} {prefix}FLOP a {unit} ({how})"
