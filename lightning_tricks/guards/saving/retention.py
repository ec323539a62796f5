"""Which checkpoints of a run stay, and which one `last` means: functions of their records alone."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_tricks.checkpoints.record import Record

Records = Mapping[str, Record]  # by the name of the file or folder


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay.

    Args:
        keep_last: the newest ones.
        keep_best: those with the best scores.
        mode: whether the lowest score is the best one, "min", or the highest, "max".
    """

    keep_last: int
    keep_best: int
    mode: Literal["min", "max"]


def last_of(records: Records) -> str | None:
    """The checkpoint that `last` means: the newest whose weights are finite numbers; where none is, the newest."""
    numbered = {name: record for name, record in records.items() if record.number > 0}
    whole = {name: record for name, record in numbered.items() if record.finite is not False}
    return _newest(whole) or _newest(numbered)


def best_first(records: Records, mode: str, keep: int) -> list[str]:
    """The `keep` checkpoints with the best scores, the best first; as with ModelCheckpoint, the older one of equals."""
    sign = -1 if mode == "max" else 1
    scored = [
        (sign * record.score, record.number, name)
        for name, record in records.items()
        if record.score is not None and math.isfinite(record.score) and record.finite is not False
    ]
    return [name for *_, name in sorted(scored)[:keep]]


def to_delete(records: Records, retention: Retention, held: Collection[str] = ()) -> list[str]:
    """The checkpoints to delete, the oldest first.

    Never among them: permanent ones, the newest one whose weights are finite, `last_of(records)`, and any that
    SafeCheckpoint did not save, which have no number.

    Args:
        records: of every checkpoint of this run in the folder, the new one with them.
        retention: how many stay.
        held: names that stay besides, such as the checkpoint that the run was resumed from.
    """
    candidates = _unprotected(records, retention, held)
    newest = sorted(records, key=lambda name: records[name].number)[-retention.keep_last :]
    return [name for name in candidates if name not in newest]


def to_make_room(records: Records, retention: Retention, held: Collection[str] = ()) -> str | None:
    """The checkpoint to delete on a full disk, before a new one is there: the next to go; None where all must stay.

    One with weights that are not finite goes first, then the oldest. What `to_delete` never names stays here too.
    """
    candidates = _unprotected(records, retention, held)
    return min(candidates, key=lambda name: (records[name].finite is not False, records[name].number), default=None)


def _unprotected(records: Records, retention: Retention, held: Collection[str]) -> list[str]:
    """The checkpoints that no rule but `keep_last` protects, the oldest first."""
    finite = {name: record for name, record in records.items() if record.number > 0 and record.finite}
    best = best_first(records, retention.mode, retention.keep_best)
    stay = {*held, *best, _newest(finite), last_of(records)}
    ours = [name for name, record in records.items() if record.number > 0 and not record.permanent]
    return sorted(set(ours) - stay, key=lambda name: records[name].number)


def _newest(records: Records) -> str | None:
    return max(records, key=lambda name: (records[name].number, name), default=None)
