"""All scalars of an event file at once: a million records in a second, where a parser takes ten. Imports no torch.

A writer of scalars lays out each record in the same way, field by field: the wall time, the step unless it is 0, then a
summary of one value, which has a tag and a float. These bytes are compared and copied for all records together. A
record of any other form is left to the parser.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_tricks.commands.runs.event_file import FOOTER, HEADER, LATEST_TIME, Records
from lightning_tricks.monitors.doctor.run_log import Floats

# Each field begins with its number and type in a byte: (number << 3) | type.
_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE_VALUE = 0x09, 0x10, 0x2A, 0x0A, 0x0A, 0x15
_MOST_BYTES = 5  # of a step: 2**35 steps
_CONTINUES = 0x80  # the bit that says that a number goes on in the next byte
Ints = NDArray[np.int64]


class Column(NamedTuple):
    """The points of one tag: number of the record, step, value, seconds since 1970."""

    orders: Ints
    steps: Ints
    values: Floats
    times: Floats


@dataclass
class Scalars:
    """The scalars of a file by tag, and the numbers of the records that are something else."""

    columns: dict[str, Column]
    others: list[int]


def read_scalars(records: Records) -> Scalars:
    """The scalars of a file. A tag has up to 127 bytes; longer ones are left to the parser."""
    data = np.frombuffer(records.data, dtype=np.uint8, count=records.end)
    starts = np.array(records.starts, dtype=np.int64)
    ends = np.append(starts[1:], records.end) - FOOTER
    at = starts + HEADER
    good = ends - at >= 9 + 2 + 2 + 2 + 5  # the shortest record of a scalar, without a step and with an empty tag
    numbers, at, ends = np.flatnonzero(good), at[good], ends[good]
    times = _floats(data, at + 1, 8)
    steps, place = _steps(data, at + 9)
    # three lengths of one byte each: of the summary, of its value, of the tag
    sizes = [data[np.minimum(place + offset, len(data) - 1)] for offset in range(6)]
    tag_size = sizes[5].astype(np.int64)
    fits = (data[at] == _WALL_TIME) & (sizes[0] == _SUMMARY) & (sizes[2] == _VALUE) & (sizes[4] == _TAG)
    value_at = place + 6 + tag_size
    fits &= (value_at + 5 == ends) & (sizes[5] < _CONTINUES)
    fits &= data[np.minimum(value_at, len(data) - 1)] == _SIMPLE_VALUE
    columns: dict[str, list[Column]] = {}
    for size in np.unique(tag_size[fits]).tolist():
        rows = np.flatnonzero(fits & (tag_size == size))
        tags = np.ascontiguousarray(data[place[rows][:, None] + 6 + np.arange(size)]).reshape(len(rows), size)
        if not size:
            continue
        found, which, number = np.unique(tags.view(f"V{size}")[:, 0], return_inverse=True, return_counts=True)
        in_order = rows[np.argsort(which, kind="stable")]  # the rows of each tag together
        for tag, own in zip(found, np.split(in_order, np.cumsum(number)[:-1]), strict=True):
            values = _floats(data, value_at[own] + 1, 4).astype(np.float64)
            own_times = np.where((times[own] > 0) & (times[own] < LATEST_TIME), times[own], np.nan)
            column = Column(numbers[own], steps[own], values, own_times)
            columns.setdefault(tag.tobytes().decode(errors="replace"), []).append(column)
    taken = np.zeros(len(starts), bool)
    taken[numbers[fits & (tag_size > 0)]] = True
    return Scalars({tag: parts[0] for tag, parts in columns.items()}, np.flatnonzero(~taken).tolist())


def _floats(data: NDArray[np.uint8], at: Ints, size: int) -> Floats:
    """The little-endian floats of `size` bytes at some places."""
    return np.ascontiguousarray(data[at[:, None] + np.arange(size)]).view(f"<f{size}")[:, 0]


def _steps(data: NDArray[np.uint8], at: Ints) -> tuple[Ints, Ints]:
    """The steps, and the places behind them; a step of 0 is not written."""
    steps, place = np.zeros(len(at), np.int64), at.copy()
    going = data[at] == _STEP
    place += going
    for byte in range(_MOST_BYTES):
        read = data[np.minimum(place, len(data) - 1)].astype(np.int64)
        steps += np.where(going, (read & 0x7F) << (7 * byte), 0)
        place += going
        going &= read >= _CONTINUES
    return steps, place
