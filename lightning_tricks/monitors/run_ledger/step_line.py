"""One step of the ledger: the values that each rank sends to rank 0, and the line that is made of them."""

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_tricks.monitors.run_ledger.exact_sum import MODULUS, signed

_BATCH, _LOSS, _WEIGHTS = 1, 2, 4  # bits of the first number: which values the rank has


class RankValues(NamedTuple):
    """The values of one step on one rank; None for a value that it does not have."""

    batch: int | None
    torch_random: int
    other_random: int
    loss: float | None
    weights: int | None

    def packed(self) -> list[int]:
        """The values as six int64, for `all_gather`."""
        optional = ((_BATCH, self.batch), (_LOSS, self.loss), (_WEIGHTS, self.weights))
        has = sum(bit for bit, value in optional if value is not None)
        (loss,) = struct.unpack("<q", struct.pack("<d", self.loss or 0.0))
        sums = [signed(self.batch or 0), self.torch_random, self.other_random, loss, signed(self.weights or 0)]
        return [has, *sums]

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> "RankValues":
        """The values that `packed` has made six int64 of."""
        has, batch, torch_random, other_random, bits, weights = numbers
        (loss,) = struct.unpack("<d", struct.pack("<q", bits))
        return cls(
            batch % MODULUS if has & _BATCH else None,
            torch_random,
            other_random,
            loss if has & _LOSS else None,
            weights % MODULUS if has & _WEIGHTS else None,
        )


def step_line(
    step: int, samples: list[tuple[int, int]] | None, ranks: Sequence[RankValues | None], counted: Sequence[int]
) -> dict[str, Any]:
    """The line of a step, without its chain.

    Args:
        step: 0 for the first optimizer step, as the logs count.
        samples: first and last position of each run of consecutive samples, of all ranks.
        ranks: the values of each rank; None for a rank that could not be asked.
        counted: the ranks whose batches together are the global batch, each row once.
    """
    shares = [rank and rank.batch for rank in map(ranks.__getitem__, counted)]
    known = [share for share in shares if share is not None]
    batch = sum(known) % MODULUS if len(known) == len(counted) else None
    return {
        "step": step,
        "samples": None if samples is None else [list(run) for run in samples],
        "batch": _hex(batch, 16),
        "torch_random": _once([_hex(rank and rank.torch_random, 8) for rank in ranks]),
        "other_random": _once([_hex(rank and rank.other_random, 8) for rank in ranks]),
        "loss": _once([_number(rank and rank.loss) for rank in ranks]),
        "weights": _once([_hex(rank and rank.weights, 16) for rank in ranks]),
    }


def _once(values: list[Any]) -> Any:
    """The value that all ranks have in common, or else the list of their values."""
    return values[0] if all(value == values[0] for value in values) else values


def _hex(number: int | None, digits: int) -> str | None:
    return None if number is None else f"{number:0{digits}x}"


def _number(value: float | None) -> float | str | None:
    """A float with all its digits; NaN and infinities, which JSON does not have, as text."""
    return value if value is None or math.isfinite(value) else str(value)
