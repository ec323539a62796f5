"""Read a few figures out of TensorBoard's event files, and no more. Imports neither torch nor TensorFlow.

A run of a million steps has a million records. TensorBoard's own reader parses all of them, in 14 s; here the places of
the few tags are searched for in the bytes, and only those records are parsed.
"""

import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tricks._foreign_files import LARGEST_STEP, check_regular, why

HEADER, FOOTER = 12, 4  # bytes of a record before its data (length and its checksum) and after them (a checksum)
_START = b"\x3a\x02\x08\x01"  # session_log { status: START }, with which a resume makes TensorBoard forget later points
_ENDED = b"_hparams_/session_end_info"  # TensorBoardDashboard writes it when training has ended without an exception
_DEVICES = re.compile(rb"\| devices \| ([1-9]\d{0,8}) \|")  # in the text with which TensorBoardDashboard begins a run
_LARGEST_RECORD = 1 << 30  # bytes: a length above it is none that a writer has announced
LATEST_TIME = 1e11  # seconds since 1970: the year 5138
_LAST_RECORDS = 1000  # at most so many are parsed to find the last one with a number


@dataclass
class Scalars:
    """Figures of a run's log, whatever file it is in.

    Args:
        series: of tags whose every point counts, by step as logged: 0 for the first.
        last: the last value of the other tags.
        steps: number of optimizer steps done, as far as the log tells.
        first_time: seconds since 1970 of the first record; None where records have no time.
        last_time: of the last one.
        ended: whether the log says that training came to its end.
        devices: number of processes, where the log tells it.
        unread: a line for each file, or part of one, that could not be read.
    """

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    steps: int | None = None
    first_time: float | None = None
    last_time: float | None = None
    ended: bool = False
    devices: int | None = None
    unread: list[str] = field(default_factory=list)


def read_events(files: Iterable[Path], series: Iterable[str], last: Iterable[str]) -> Scalars:
    """Figures of a run's event files, in the order of their names; a file that is cut off counts up to there.

    Args:
        files: of one folder.
        series: tags of which every point is wanted: few ones, such as those of validations.
        last: tags of which the last value is wanted.
    """
    found, every, latest = Scalars(), list(series), list(last)
    points: list[tuple[str | None, int, float]] = []
    for file in sorted(files):
        try:
            with open_records(file) as records:
                if records is not None:
                    points += _read_file(records, every, latest, found)
                    if records.damage is not None:
                        found.unread.append(f"{file.name}: {records.damage}")
        except (OSError, ValueError) as error:
            found.unread.append(f"{file.name}: {why(error)}")
    end = LARGEST_STEP + 1
    for tag, step, value in reversed(points):  # from the last one on, each mark and each point is looked at once
        if tag is None:
            end = min(end, step)
        elif step < end:
            found.series.setdefault(tag, {}).setdefault(step, value)
    return found


@contextmanager
def open_records(file: Path) -> Iterator["Records | None"]:
    """The records of an event file; None for an empty file, as that of a run that has logged nothing yet.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or has no record.
    """
    check_regular(file)
    with file.open("rb") as opened:
        if not file.stat().st_size:
            yield None
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            records = Records(data)
            if not records.starts:
                raise ValueError("no event file, or cut off in its first record")
            yield records


class Records:
    """The records of one file. Their checksums are not looked at: a disk's faults are not what one asks for here.

    Args:
        data: the file's bytes.

    `damage` is None, or a line where the file goes on with bytes that no writer begins a record with. A last record
    that was cut short is no damage: it may be written at this moment.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.starts: list[int] = []
        self.damage: str | None = None
        place, size = 0, len(data)
        unpack = struct.Struct("<Q").unpack_from
        while place + HEADER <= size:
            length = unpack(data, place)[0]
            end = place + HEADER + length + FOOTER
            if not 0 < length <= _LARGEST_RECORD:
                self.damage = f"damaged at byte {place:,} of {size:,}: read up to there, {len(self.starts):,} records"
                break
            if end > size:
                break  # cut off
            self.starts.append(place)
            place = end
        self.end = place

    def parse(self, number: int) -> Any:
        """The event of a record; None for bytes that are none."""
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event

        start = self.starts[number] + HEADER
        end = (self.starts[number + 1] if number + 1 < len(self.starts) else self.end) - FOOTER
        try:
            return Event.FromString(self.data[start:end])
        except DecodeError:
            return None

    def with_bytes(self, pattern: bytes) -> list[int]:
        """The numbers of all records that hold some bytes."""
        found, place = [], self.data.find(pattern, 0, self.end)
        while place >= 0:
            number = bisect_right(self.starts, place) - 1
            found.append(number)
            after = self.starts[number + 1] if number + 1 < len(self.starts) else self.end
            place = self.data.find(pattern, after, self.end)
        return found

    def last_with_bytes(self, pattern: bytes) -> int | None:
        """The number of the last record that holds some bytes."""
        place = self.data.rfind(pattern, 0, self.end)
        return bisect_right(self.starts, place) - 1 if place >= 0 else None


def _tag(name: str) -> bytes:
    """A tag as it stands in a record: the field's number and the length, both before the text."""
    text, size = name.encode(), b""
    length = len(text)
    while length > 0x7F:  # seven bits a byte; the eighth says that more follow
        size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
    return b"\x0a" + size + bytes([length]) + text


def _read_file(
    records: Records, series: list[str], last: list[str], found: Scalars
) -> list[tuple[str | None, int, float]]:
    """The points of `series` in their order, as (tag, step, value); no tag stands for a resume from that step on."""
    points: list[tuple[str | None, int, float]] = []
    numbers = {number for tag in series for number in records.with_bytes(_tag(tag))}
    for number in sorted(numbers | set(records.with_bytes(_START))):
        if (event := records.parse(number)) is None:
            continue
        if event.HasField("session_log"):
            points.append((None, event.step, 0.0))
        points += ((tag, event.step, value) for tag, value in values_of(event).items() if tag in series)
    for tag in last:
        place = records.last_with_bytes(_tag(tag))
        if place is not None and tag in (values := values_of(records.parse(place))):
            found.last[tag] = values[tag]
    _read_ends(records, found)
    return points


def _read_ends(records: Records, found: Scalars) -> None:
    """Times of the first and the last record, the last step, and what the dashboard has written."""
    first, last = records.parse(0), records.parse(len(records.starts) - 1)
    if found.first_time is None:
        found.first_time = time_of(first)
    if (time := time_of(last)) is not None:
        found.last_time = time
    for number in range(len(records.starts) - 1, max(len(records.starts) - _LAST_RECORDS, 0) - 1, -1):
        event = records.parse(number)
        if event is None:
            continue
        if event.HasField("session_log") and 0 < event.step <= LARGEST_STEP:
            found.steps = int(event.step)
            break
        names = values_of(event).keys() - {"hp_metric", "epoch"}
        if any(not name.startswith("hp/") for name in names):  # those of the HParams tab are written without a step
            found.steps = int(event.step) + 1
            break
    found.ended = records.last_with_bytes(_ENDED) is not None
    if match := _DEVICES.search(records.data):
        found.devices = int(match[1])


def time_of(event: Any) -> float | None:
    """Seconds since 1970 at which an event was written; None where it says none."""
    return float(event.wall_time) if event is not None and 0 < event.wall_time < LATEST_TIME else None


def values_of(event: Any) -> dict[str, float]:
    """The numbers of an event by their tags; none where its step is none."""
    found = {}
    for value in event.summary.value if event is not None and 0 <= event.step <= LARGEST_STEP else ():
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            found[value.tag] = float(value.simple_value)
        elif kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
            tensor = value.tensor
            if tensor.float_val:
                found[value.tag] = float(tensor.float_val[0])
            elif len(tensor.tensor_content) == 4:
                found[value.tag] = struct.unpack("<f", tensor.tensor_content)[0]
    return found
