"""FLOPs of a micro-batch of any module: given by the user, by the module itself, or counted once."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_tricks._errors import UsageError
from lightning_tricks.accounting.flops import Attention
from lightning_tricks.accounting.measured_flops import CannotCount, counter_of_copy
from lightning_tricks.monitors.mfu.batch import count_tokens, samples_in, tensors_of, token_shape

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Flops = tuple[float, float]  # the model's, and those spent again: nan where not known


@dataclasses.dataclass
class Contents:
    """What a micro-batch holds.

    Args:
        tokens: that count: a number or a scalar on the device.
        positions: tokens with their padding; equal to `tokens` where that is a number.
        length: T, tokens in a row; 0 where not known.
        samples: rows.
    """

    tokens: Tensor | float
    positions: int
    length: int
    samples: int


def contents(module: Any, batch: Any) -> Contents:
    """Count a micro-batch, with the module's own `tokens_in(batch)` if it has one."""
    tensors = tensors_of(batch)
    shape = token_shape(tensors)
    own = getattr(module, "tokens_in", None)
    tokens = own(batch) if callable(own) else count_tokens(tensors, shape)
    rows, length = shape or (0, 0)
    positions = rows * length if isinstance(tokens, Tensor) else tokens
    return Contents(tokens, positions, length, samples_in(tensors))


@dataclasses.dataclass
class BatchFlops:
    """FLOPs by the position or by the sample, and where the figure comes from.

    Args:
        of_length: FLOPs of one position in a row of that length, None where they go by the sample.
        of_sample: FLOPs of one sample.
        origin: one line of text.
    """

    of_length: Callable[[int], Flops] | None
    of_sample: Flops
    origin: str

    def __call__(self, batch: Contents) -> Flops:
        """FLOPs of the whole micro-batch, padding included."""
        count = batch.positions if self.of_length else batch.samples
        model, again = self.of_length(batch.length) if self.of_length else self.of_sample
        return count * model, count * again


def find_batch_flops(
    module: Any, batch: Any, per_token: float | None, per_sample: float | None, attention: Attention, trainer: Any
) -> BatchFlops:
    """The options first, then the module's `flops_per_token(seq_len, attention)`, then a count on a copy.

    Raises:
        UsageError: `flops_per_token` is given, but the batch has no tokens.
        CannotCount: the step cannot be run on a copy, see `count_flops`.
    """
    held = contents(module, batch)
    if per_token is not None:
        if not held.positions:
            raise UsageError(
                f"flops_per_token={per_token:g}: no tokens were found in the batch; give flops_per_sample, "
                "or the module a method tokens_in(batch)"
            )
        return BatchFlops(lambda length: (per_token, math.nan), (0.0, 0.0), _a(per_token, "token", "given"))
    if per_sample is not None:
        return BatchFlops(None, (per_sample, math.nan), _a(per_sample, "sample", "given"))
    own = getattr(module, "flops_per_token", None)
    if callable(own) and held.length:
        known: dict[int, Flops] = {}

        def of_length(length: int) -> Flops:
            if length not in known:
                known[length] = own(length, attention)
            return known[length]

        return BatchFlops(of_length, (0.0, 0.0), _a(of_length(held.length)[0], "token", f"{attention} attention"))
    return flops_of_batch(counter_of_copy(module, batch, trainer, trainer.precision_plugin.train_step_context), held)


def flops_of_batch(counter: Any, held: Contents, copies: int = 1) -> BatchFlops:
    """What was counted on a batch, for others: by the position, or by the sample where there are no tokens.

    Args:
        counter: a `FlopCounter`.
        held: what the batch holds.
        copies: ranks that share the work on it, each of which counted its own share.

    Raises:
        CannotCount: the batch holds neither tokens nor samples.
    """
    if not (held.positions or held.samples):
        raise CannotCount("the batch holds no tensors before the step")
    unit, count = ("token", held.positions) if held.positions else ("sample", held.samples)
    each = (copies * counter.model / count, copies * counter.recompute / count)
    how = "counted on the first batch, attention in full"
    for name, part in counter.uncounted.items():
        how += f", without {name} in {part}"
    origin = _a(each[0], unit, how)
    return BatchFlops((lambda length: each) if held.positions else None, each, origin)


def _a(flops: float, unit: str, how: str) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in _SI if flops >= scale), (1.0, ""))
    return f"{flops / scale:.3g} {prefix}FLOP a {unit} ({how})"
