"""Records with the checksum in C are TensorBoard's own, byte by byte."""

import io
import runpy
import sys
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_tricks.loggers import ResumingTensorBoardLogger, _fast_records
from lightning_tricks.loggers._fast_records import use_fast_checksums, write_record


@given(st.binary(max_size=300))
def test_a_record_is_tensorboards(data):
    ours, theirs = io.BytesIO(), io.BytesIO()
    write_record(ours, data)
    RecordWriter(theirs).write(data)
    assert ours.getvalue() == theirs.getvalue()


def test_the_logger_uses_it_and_tensorboard_reads_what_it_wrote(tmp_path, monkeypatch):
    lengths = []
    real = _fast_records.masked_crc
    monkeypatch.setattr(_fast_records, "masked_crc", lambda data: lengths.append(len(data)) or real(data))
    logger = ResumingTensorBoardLogger(tmp_path, version="")
    for step in range(3):
        logger.log_metrics({"train/loss": step + 0.5}, step)
    logger.save()
    assert len(lengths) == 6  # length and data of each event
    logger.finalize("success")
    logger.log_metrics({"train/loss": 3.5}, 3)  # of a second fit, which writes another file
    logger.save()
    assert len(lengths) == 8
    events = [event for file in tmp_path.rglob("events*") for event in EventFileLoader(str(file)).Load()]
    values = sorted((event.step, value.tag) for event in events for value in event.summary.value)
    assert values == [(step, "train/loss") for step in range(4)]


def test_a_writer_of_another_make_is_left_alone():
    other = SimpleNamespace(_async_writer=SimpleNamespace(queue=[]))
    use_fast_checksums(other)
    use_fast_checksums(SimpleNamespace())
    assert vars(other._async_writer) == {"queue": []}


def test_without_the_package_tensorboard_writes_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setattr(_fast_records, "google_crc32c", None)
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "google_crc32c", None)
        assert runpy.run_path(_fast_records.__file__)["google_crc32c"] is None
    logger = ResumingTensorBoardLogger(tmp_path, version="")
    logger.log_metrics({"train/loss": 0.5}, 3)
    logger.save()
    (file,) = (path for path in tmp_path.rglob("events*"))
    assert [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value] == [3]
