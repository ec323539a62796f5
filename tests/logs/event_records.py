"""Event files written by hand, record by record, for tests of what reads them."""

import struct

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

FILE = "events.out.tfevents.1.a"


def framed(data, length=None):
    """A record of these bytes, with a length of its own or another one."""
    return struct.pack("<Q", len(data) if length is None else length) + bytes(4) + data + bytes(4)


def record(event):
    return framed(event.SerializeToString())


def scalar(tag, step, value, seconds=1e9):
    return Event(wall_time=seconds, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def losses(steps, value=lambda step: 5.0 - step / 100, tag="train/loss"):
    return [scalar(tag, step, value(step), 1e9 + step) for step in steps]


def written(folder, *events, name=FILE):
    """The folder of a run with an event file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(map(record, events)))
    return folder
