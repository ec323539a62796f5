"""The scalars of TensorBoard's event files: a million in two seconds. Imports neither torch, TensorBoard nor protobuf.

A file is a row of records, each an `Event` of Protocol Buffers. A logger writes the points of a metric in one form, in
which only time, step and value differ: the rest of such a record is looked up, and only its first one is parsed.
"""

import math
import mmap
import re
import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_tricks._core.foreign_files import LARGEST_STEP, check_regular

_HEADER, _FOOTER = 12, 4  # bytes of a record before its data (length and its checksum) and after them (a checksum)
_LARGEST_RECORD = 1 << 30  # bytes: a length above it is none that a writer has announced
_LATEST_TIME = 1e11  # seconds since 1970: the year 5138
_ENDED = b"_hparams_/session_end_info"  # TensorBoardDashboard writes it when training has ended without an exception
_DEVICES = re.compile(rb"\| devices \| ([1-9]\d{0,8}) \|")  # in the text with which TensorBoardDashboard begins a run
# Numbers of fields; see tensorboard/compat/proto/event.proto, summary.proto and tensor.proto.
_WALL_TIME, _STEP, _SUMMARY, _SESSION_LOG = 1, 2, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 1, 2, 8, 9
_CONTENT, _FLOATS = 4, 5
_TIME_FIRST = _WALL_TIME << 3 | 1  # a field's number and type are one byte

_read_length = struct.Struct("<Q").unpack_from
_read_double = struct.Struct("<d").unpack_from
_read_float = struct.Struct("<f").unpack_from


Point = tuple[str | None, int, float, float]  # tag, step, value, seconds since 1970 or NaN; without a tag, a resume


@dataclass
class Facts:
    """What the files of a run say beside their points.

    Args:
        first_time: seconds since 1970 of the first record that has a time; None where none has.
        last_time: of the last one.
        ended: whether training came to its end, by the last file.
        devices: number of processes, where the dashboard has written it.
        unread: a line for each file, or part of one, that could not be read. A last record that was cut short is none:
            it may be written at this moment.
    """

    first_time: float | None = None
    last_time: float | None = None
    ended: bool = False
    devices: int | None = None
    unread: list[str] = field(default_factory=list)


def read_events(file: Path, found: Facts) -> Iterator[Point]:
    """The scalars of a file in their order, up to where it is cut off.

    A point without a tag stands for a resume, with which TensorBoard forgets the points before it from its step on.
    Checksums are not looked at: a disk's faults are not what one asks for here.

    Args:
        file: of any writer; an empty one is that of a run that has logged nothing yet.
        found: filled in while the points are taken.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or has no record.
    """
    found.ended = False
    check_regular(file)
    with file.open("rb") as opened:
        if not file.stat().st_size:
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            problem = yield from _points(data, found)
            found.ended = data.rfind(_ENDED) >= 0
            if match := _DEVICES.search(data):
                found.devices = int(match[1])
    if problem:
        found.unread.append(f"{file.name}: {problem}")


def _points(data: mmap.mmap, found: Facts) -> Generator[Point, None, str]:
    """The points; returns a line on bytes with which no writer begins a record, and on records that hold no event."""
    tags: dict[bytes, str] = {}  # of scalars, by what stands between step and value in their records
    place, size, records, no_events, seconds, damage = 0, len(data), 0, 0, math.nan, ""
    while place + _HEADER <= size:
        (length,) = _read_length(data, place)
        end = place + _HEADER + length + _FOOTER
        if not 0 < length <= _LARGEST_RECORD:
            damage = f"damaged at byte {place:,} of {size:,}: read up to there, {records:,} records"
            break
        if end > size:
            break  # cut off
        record = data[place + _HEADER : end - _FOOTER]
        place, records = end, records + 1
        try:
            if length > 14 and record[0] == _TIME_FIRST:
                step, at = _step(record)
                (seconds,) = _read_double(record, 1)
                if (tag := tags.get(record[at:-4])) is not None and step <= LARGEST_STEP:  # in a form that is known
                    if not 0 < seconds < _LATEST_TIME:
                        seconds = math.nan
                    yield tag, step, _read_float(record, length - 4)[0], seconds
                    continue
            seconds, points = _event(record)
        except ValueError:
            no_events += 1
            continue
        yield from points
        if found.first_time is None and seconds > 0:
            found.first_time = seconds
        if len(points) == 1 and record[0] == _TIME_FIRST and (tag := points[0][0]) is not None:
            between = record[_step(record)[1] : -4]
            if between.endswith(tag.encode() + bytes([_SIMPLE_VALUE << 3 | 5])):
                tags[between] = tag
    if not records:
        raise ValueError("no event file, or cut off in its first record")
    if seconds > 0:
        found.last_time = seconds
    left_out = f"{no_events:,} record{'s' * (no_events > 1)} left out that hold no event" if no_events else ""
    return "; ".join(filter(None, [left_out, damage]))


def _step(record: bytes) -> tuple[int, int]:
    """The step behind the time of a record, and the place behind it; a step of 0 is not written."""
    return _varint(record, 10) if record[9] == _STEP << 3 else (0, 9)


def _event(record: bytes) -> tuple[float, list[Point]]:
    """Time and points of a record of any form.

    Raises:
        ValueError: it is no event.
    """
    fields = list(_fields(record))
    last = dict(fields)
    step, seconds = last.get(_STEP, 0), math.nan
    time: Any = last.get(_WALL_TIME)
    if _has(time, 8) and 0 < _read_double(time)[0] < _LATEST_TIME:
        seconds = _read_double(time)[0]
    if not isinstance(step, int) or step > LARGEST_STEP:
        return seconds, []
    points: list[Point] = []
    if _message(last.get(_SESSION_LOG)).get(1) == 1 and step:  # its status is START
        points.append((None, step, 0.0, seconds))
    for _, summary in filter(lambda field: field[0] == _SUMMARY, fields):
        for number, value in _fields(summary):
            if number == _VALUE and (read := _value(_message(value))) is not None:
                points.append((read[0], step, read[1], seconds))
    return seconds, points


def _value(value: dict[int, Any]) -> tuple[str, float] | None:
    """Tag and number of a value; None for a picture, a text and the like."""
    tag = value.get(_TAG, b"")
    number: Any = value.get(_SIMPLE_VALUE)
    if number is None and _message(_message(value.get(_METADATA)).get(1)).get(1) == b"scalars":
        tensor = _message(value.get(_TENSOR))
        number = tensor.get(_FLOATS, tensor.get(_CONTENT))  # one number alone is packed as it stands
    if not isinstance(tag, bytes) or not _has(number, 4):
        return None
    return tag.decode(errors="replace"), _read_float(number)[0]


def _has(value: Any, size: int) -> bool:
    return isinstance(value, bytes) and len(value) == size


def _message(value: Any) -> dict[int, Any]:
    """The last value of each field of a message inside another one; none where it is no message."""
    return dict(_fields(value)) if isinstance(value, bytes) else {}


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: a whole number, or bytes.

    Raises:
        ValueError: it is no message.
    """
    if not isinstance(data, bytes):
        raise ValueError("no message")
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(key & 7, -1)
        if key & 7 == 2:
            size, place = _varint(data, place)
        if size < 0 or place + size > len(data):
            raise ValueError("no message")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data) and shift < 70:  # seven bits a byte; the eighth says that more follow
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError("no message")
