"""Files of `predict`: the same rows by several checkpoints, as paired differences of the loss a token. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.foreign_files import parse_json
from lightning_tricks.logs.compare.intervals import LEAST, Interval, block_means


class RowLoss(NamedTuple):
    """The loss of one row."""

    place: tuple[int, int, int]  # loader, batch and row in the data
    nats: float  # sum over its tokens
    tokens: int


def read_predictions(file: str) -> list[RowLoss]:
    """The rows of a file that `predict --output` wrote, of log-probabilities; null is a token that does not count.

    Rows without a token that counts are left out.

    Raises:
        UsageError: there is no such file, or it is another one.
    """
    rows = []
    try:
        with Path(file).open(encoding="utf-8-sig") as lines:
            for line in lines:
                row = parse_json(line)
                place = (row.get("dataloader", 0), row["batch"], row["row"])
                values = np.asarray(row["prediction"], dtype=np.float64)
                values = values[~np.isnan(values)]
                are_logs = values.ndim == 1 and np.isfinite(values).all() and (values <= 0).all()
                if not are_logs or not all(type(part) is int for part in place):
                    raise ValueError
                rows.append(RowLoss(place, -float(values.sum()), len(values)))
    except OSError as error:
        raise UsageError(f"compare: predictions={file}: {error.strerror}: give a file of predict --output") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"compare: predictions={file}: line {len(rows) + 1} holds no log-probabilities of a row: give a file that "
            "predict --output wrote"
        ) from None
    if not (counted := [row for row in rows if row.tokens]):
        raise UsageError(f"compare: predictions={file}: no token of it counts: give the predictions of other data")
    return counted


def differences(files: Sequence[str], groups: int, level: float) -> list[Interval]:
    """The loss a token of each file but the first, less that of the first; none without files or for under 40 rows.

    Raises:
        UsageError: another number of files than of groups; files of other rows; see `read_predictions`.
    """
    if not files:
        return []
    if len(files) != groups:
        number = f"{len(files)} file{'s' * (len(files) > 1)}"
        raise UsageError(f"compare: predictions: {number} for {groups} groups: give one for each, in their order")
    first, *others = map(read_predictions, files)
    for file, rows in zip(files[1:], others, strict=True):
        if [(row.place, row.tokens) for row in rows] != [(row.place, row.tokens) for row in first]:
            raise UsageError(
                f"compare: predictions={file}: its rows are not those of {files[0]} ({len(rows):,} and "
                f"{len(first):,}): predict both on the same data"
            )
    if len(first) < LEAST:
        return []
    tokens = [row.tokens for row in first]
    return [block_means([b.nats - a.nats for a, b in zip(first, rows, strict=True)], tokens, level) for rows in others]
