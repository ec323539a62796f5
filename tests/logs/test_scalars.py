"""The reader of logs: every kind of file in whatever state, as TensorBoard reads it, with its restarts and times."""

import math

import numpy as np
import pytest
import short_run
import yaml
from made_logs import FILE, losses, scalar, written
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import SummaryWriter

from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.logs.ledger_file import LedgerFile
from lightning_tricks.logs.run import find_run
from lightning_tricks.logs.run_log import read_log
from lightning_tricks.logs.scalars import read_scalars


def points(folder, name, **names):
    series = read_log(folder, names)[0].metrics[name]
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


# ---- event files


def test_scalars_are_read_as_tensorboard_reads_them(tmp_path):
    """Of every form: large steps, steps of 0, negative values, NaN, long and other tags, several in one record."""
    writer = SummaryWriter(tmp_path)
    steps = [0, 1, 127, 128, 300, 70_000, 2**31, 2**33]
    for step in steps:
        writer.add_scalar("train/loss", step / 7, step)
        writer.add_scalar("b" * 127, -1.5, step)
        writer.add_scalar("c" * 128, 2.5, step)
        writer.add_scalar("ü", math.nan, step)
        writer.add_histogram("weights", np.arange(4.0), step)
    writer.add_text("recipe", "text")
    writer.add_scalar("new", 3.5, 1, new_style=True)
    writer.close()
    shown = short_run.events(tmp_path)
    log, unread = read_log(tmp_path)
    assert set(log.metrics) - {log.names["speed"]} == {"train/loss", "b" * 127, "c" * 128, "ü", "new"}
    assert unread == []
    for name in ("train/loss", "b" * 127, "c" * 128, "ü"):
        expected = [(event.step, event.value) for event in shown.Scalars(name)]
        np.testing.assert_array_equal(np.array(points(tmp_path, name)), np.array(expected))
    assert points(tmp_path, "new") == [(1, 3.5)]


@pytest.mark.parametrize("lost", [1, 4, 20, 45])
def test_a_file_that_is_cut_off_counts_up_to_there(tmp_path, lost):
    file = written(tmp_path, *losses(range(10))) / FILE
    file.write_bytes(file.read_bytes()[:-lost])
    assert points(tmp_path, "train/loss") == [(step, pytest.approx(5 - step / 100)) for step in range(9)]


def test_points_before_a_resume_are_forgotten_from_its_step_on_also_those_that_are_not_written_again(tmp_path):
    start = lambda step: Event(step=step, session_log=SessionLog(status=SessionLog.START))  # noqa: E731
    early, late = losses(range(5, 6), lambda _: 1.0), losses(range(8, 9), lambda _: 2.0)
    written(tmp_path, *losses(range(8)), scalar("other", 6, 1.0), start(5), *early, start(7), *late)
    found = points(tmp_path, "train/loss")
    assert ([step for step, _ in found], found[-2:]) == ([0, 1, 2, 3, 4, 5, 8], [(5, 1.0), (8, 2.0)])
    assert "other" not in read_log(tmp_path)[0].metrics
    assert read_log(tmp_path)[0].restarts == [5, 7]
    back = written(tmp_path / "back", *losses(range(8)), start(7), start(5), *late)
    assert [step for step, _ in points(back, "train/loss")] == [0, 1, 2, 3, 4, 8]


def test_a_value_counts_wherever_it_stands_in_its_record_and_a_time_that_is_none_does_not(tmp_path):
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    value = Summary.Value(tag="train/loss", simple_value=2.5, metadata=metadata)  # the metadata come last
    events = [Event(wall_time=1e9, step=step, summary=Summary(value=[value])) for step in (0, 0, 1)]
    bad = [scalar("train/loss", step, 0.5, seconds) for step, seconds in ((2, 1e9), (3, math.inf), (4, -1.0))]
    log, _ = read_log(written(tmp_path, *events, *bad))
    assert points(tmp_path, "train/loss") == [(0, 2.5), (1, 2.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert log.times.steps.tolist() == [0, 1, 2]


def test_a_second_file_goes_on_where_it_begins(tmp_path):
    written(tmp_path, *losses(range(8)))
    written(tmp_path, *losses(range(5, 7), lambda _: 1.0), name="events.out.tfevents.2.a")
    assert [step for step, _ in points(tmp_path, "train/loss")] == [0, 1, 2, 3, 4, 5, 6]
    assert read_log(tmp_path)[0].restarts == [5]


def test_a_later_validation_hides_no_curve_and_counts_no_steps(tmp_path):
    written(tmp_path, *losses(range(80)), *losses(range(9, 80, 10), tag="val/loss"))
    later = [scalar("val/loss", 0, 4.2), scalar("val_acc", 0, 0.5), scalar("test/loss", 0, 4.3)]
    written(tmp_path, *later, name="events.out.tfevents.2.a")
    assert [step for step, _ in points(tmp_path, "val/loss")] == [*range(9, 80, 10)]
    assert points(tmp_path, "test/loss") == [(0, pytest.approx(4.3))]
    log, _ = read_log(tmp_path)
    assert (log.restarts, read_scalars(tmp_path).steps) == ([], 80)


@pytest.mark.parametrize("seed", range(6))
def test_steps_out_of_order_are_no_restarts_and_repeated_ones_are(tmp_path, seed):
    order = np.argsort(np.arange(300) + np.random.default_rng(seed).uniform(0, 6, 300))  # written by several threads
    shuffled = written(tmp_path / "a", *losses(order.tolist()))
    assert read_log(shuffled)[0].restarts == []
    assert [step for step, _ in points(shuffled, "train/loss")] == [*range(300)]
    again = written(tmp_path / "b", *losses([*order.tolist(), *range(250, 320)]))
    assert read_log(again)[0].restarts == [250]


def test_two_loggers_in_one_folder_are_one_run_with_the_times_of_the_event_file(tmp_path):
    steps = range(49, 500, 50)
    written(tmp_path, *losses(steps))
    rows = "".join(f"{step},{5 - step / 100},{step}\n" for step in steps)
    (tmp_path / "metrics.csv").write_text(f"step,train/loss,own\n{rows}")
    log, _ = read_log(tmp_path)
    assert (log.restarts, log.times.steps.tolist(), log.metrics["own"].values.tolist()) == ([], [*steps], [*steps])


def test_a_resumed_run_has_its_restart(tmp_path):
    logger = lambda: ResumingTensorBoardLogger(tmp_path, version="run")  # noqa: E731
    short_run.fit(logger(), 8, callbacks=(short_run.save_every(6, tmp_path),), enable_checkpointing=True)
    short_run.fit(logger(), 12, model=short_run.Model(2), ckpt_path=tmp_path / "step=6.ckpt")
    log, _ = read_log(find_run(tmp_path))
    assert log.restarts == [6]
    assert log["loss"].values.tolist() == [*(1000 + step for step in range(6)), *(2000 + step for step in range(6, 12))]


def test_speed_follows_from_the_times_of_the_records(tmp_path):
    events = [scalar("train/loss", step, 1.0, 1e9 + 2 * step) for step in range(0, 50, 10)]
    assert read_log(written(tmp_path, *events))[0]["speed"].values.tolist() == [0.5] * 4


# ---- the other files


def test_recipe_and_ledger_are_read(tmp_path):
    written(tmp_path, *losses(range(4)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"gradient_clip_val": 0.5}}))
    ledger = LedgerFile(tmp_path / "ledger.jsonl")
    ledger.append([{"start": 0}, {"step": 0, "batch": "aa"}, {"step": 1, "batch": "bb"}, {"start": 1}])
    ledger.append([{"step": 1, "batch": "cc"}, {"step": 2, "batch": None}])
    log, unread = read_log(tmp_path)
    assert (log.settings["trainer.gradient_clip_val"], log.restarts, unread) == (0.5, [1], [])
    assert log.batches == {0: "aa", 1: "cc"}
