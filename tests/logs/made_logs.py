"""Logs written by hand for tests of what reads them: event files record by record, tables."""

import struct

import yaml
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


TABLE = "step,train/loss,val/loss\n" + "".join(f"{step},{5 - step / 20},{4 - step / 20}\n" for step in range(40))


def run_in(folder, table=TABLE, settings=None):
    """The folder of a run with a table and settings, of which each may be None."""
    folder.mkdir(parents=True, exist_ok=True)
    if table is not None:
        (folder / "metrics.csv").write_text(table)
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder
