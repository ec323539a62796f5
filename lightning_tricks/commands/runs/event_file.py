"""Read a few figures out of TensorBoard's event files, and no more. Imports neither torch nor TensorFlow.

A run of a million steps has a million records. TensorBoard's own reader parses all of them, in 14 s; here the places of
the few tags are searched for in the bytes, and only those records are parsed.
"""

import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER, FOOTER = 12, 4  # bytes of a record before its data (length and its checksum) and after them (a checksum)
_START = b"\x3a\x02\x08\x01"  # session_log { status: START }, with which a resume makes TensorBoard forget later points
_ENDED = b"_hparams_/session_end_info"  # TensorBoardDashboard writes it when training has ended without an exception
_DEVICES = re.compile(rb"\| devices \| (\d+) \|")  # in the text with which TensorBoardDashboard begins a run
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
    """

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    steps: int | None = None
    first_time: float | None = None
    last_time: float | None = None
    ended: bool = False
    devices: int | None = None


def read_events(files: Iterable[Path], series: Iterable[str], last: Iterable[str]) -> Scalars:
    """Figures of a run's event files, in the order of their names; a file that is cut off counts up to there.

    Args:
        files: of one folder.
        series: tags of which every point is wanted: few ones, such as those of validations.
        last: tags of which the last value is wanted.
    """
    found, every, latest = Scalars(), list(series), list(last)
    for file in sorted(files):
        try:
            if file.stat().st_size == 0:
                continue
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _read_file(Records(data), every, latest, found)
        except (OSError, ValueError):  # gone meanwhile, or not to be read
            continue
    return found


class Records:
    """The records of one file. Their checksums are not looked at: a disk's faults are not what one asks for here."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.starts = data, []
        place, size = 0, len(data)
        unpack = struct.Struct("<Q").unpack_from
        while place + HEADER <= size:
            length = unpack(data, place)[0]
            end = place + HEADER + length + FOOTER
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


def _read_file(records: Records, series: list[str], last: list[str], found: Scalars) -> None:
    if not records.starts:
        return
    numbers = {number for tag in series for number in records.with_bytes(_tag(tag))}
    starts = set(records.with_bytes(_START))
    for number in sorted(numbers | starts):
        if (event := records.parse(number)) is None:
            continue
        if event.HasField("session_log"):
            _forget_from(found, int(event.step))
        for tag, value in values_of(event).items():
            if tag in series:
                found.series.setdefault(tag, {})[int(event.step)] = value
    for tag in last:
        place = records.last_with_bytes(_tag(tag))
        if place is not None and tag in (values := values_of(records.parse(place))):
            found.last[tag] = values[tag]
    _read_ends(records, found)


def _forget_from(found: Scalars, step: int) -> None:
    for points in found.series.values():
        for later in [each for each in points if each >= step]:
            del points[later]


def _read_ends(records: Records, found: Scalars) -> None:
    """Times of the first and the last record, the last step, and what the dashboard has written."""
    first, last = records.parse(0), records.parse(len(records.starts) - 1)
    if first is not None and found.first_time is None:
        found.first_time = float(first.wall_time)
    if last is not None:
        found.last_time = float(last.wall_time)
    for number in range(len(records.starts) - 1, max(len(records.starts) - _LAST_RECORDS, 0) - 1, -1):
        event = records.parse(number)
        if event is None:
            continue
        if event.HasField("session_log") and event.step > 0:
            found.steps = int(event.step)
            break
        names = values_of(event).keys() - {"hp_metric", "epoch"}
        if any(not name.startswith("hp/") for name in names):  # those of the HParams tab are written without a step
            found.steps = int(event.step) + 1
            break
    found.ended = records.last_with_bytes(_ENDED) is not None
    if match := _DEVICES.search(records.data):
        found.devices = int(match[1])


def values_of(event: Any) -> dict[str, float]:
    """The numbers of an event by their tags."""
    found = {}
    for value in event.summary.value if event is not None else ():
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
