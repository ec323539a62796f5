"""Files of `predict`: the same rows by two checkpoints, as a paired difference of the loss a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_tricks._errors import UsageError
from lightning_tricks._foreign_files import parse_json
from lightning_tricks.logs.compare.intervals import Interval, block_means
from lightning_tricks.logs.run_log import Floats


@dataclass(frozen=True)
class Predictions:
    """A file, row by row.

    Args:
        file: its name.
        rows: place of each row in the data.
        nats: (n,) sums of the losses of the rows' tokens.
        tokens: (n,) numbers of those tokens.
    """

    file: str
    rows: list[tuple[int, int, int]]
    nats: Floats
    tokens: Floats


def read_predictions(file: str) -> Predictions:
    """A file that `predict --output` wrote, of log-probabilities, where null stands for a token that does not count.

    Raises:
        UsageError: there is no such file, or it is another one.
    """
    rows, sums = [], []
    try:
        with Path(file).open(encoding="utf-8-sig") as lines:
            for line in lines:
                row = parse_json(line)
                place = (row.get("dataloader", 0), row["batch"], row["row"])
                values = np.asarray(row["prediction"], dtype=np.float64)
                values = values[~np.isnan(values)]
                if values.ndim != 1 or not all(type(number) is int for number in place) or not _are_logs(values):
                    raise ValueError
                rows.append(place)
                sums.append((-values.sum(), len(values)))
    except OSError as error:
        raise UsageError(f"compare: predictions={file}: {error.strerror}: give a file of predict --output") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"compare: predictions={file}: line {len(rows) + 1} holds no log-probabilities of a row: give a file that "
            "predict --output wrote"
        ) from None
    if not rows:
        raise UsageError(f"compare: predictions={file}: it has no rows: give a file that predict --output wrote")
    if not any(count for _, count in sums):
        raise UsageError(f"compare: predictions={file}: no token of it counts: give the predictions of other data")
    nats, tokens = np.array(sums, dtype=np.float64).T
    return Predictions(file, rows, nats, tokens)


def _are_logs(values: Floats) -> bool:
    """Whether they are logarithms of probabilities: finite, and none above 0."""
    return bool(np.isfinite(values).all() and (values <= 0).all())


def read_all(files: Sequence[str], groups: int) -> list[Predictions]:
    """A file for each group, all of the same rows.

    Raises:
        UsageError: another number of files than of groups; files of other rows; see `read_predictions`.
    """
    if files and len(files) != groups:
        number = f"{len(files)} file{'s' * (len(files) > 1)}"
        raise UsageError(f"compare: predictions: {number} for {groups} groups: give one for each, in their order")
    found = [read_predictions(file) for file in files]
    for each in found[1:]:
        if each.rows != found[0].rows or not np.array_equal(each.tokens, found[0].tokens):
            raise UsageError(
                f"compare: predictions={each.file}: its rows are not those of {found[0].file} ({len(each.rows):,} and "
                f"{len(found[0].rows):,}): predict both on the same data"
            )
    return found


def difference(first: Predictions, second: Predictions, level: float) -> Interval | None:
    """The loss a token of the second less that of the first, on the same rows; None for under 40 rows."""
    return block_means((second.nats - first.nats).tolist(), level, first.tokens.tolist(), "rows")
