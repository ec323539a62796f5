"""`doctor` reads every kind of log in whatever state, says what is missing, and exits with 1 where a run is sick."""

import json
import math
import os
import struct

import numpy as np
import pytest
import short_run
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from lightning_tricks import __main__ as door
from lightning_tricks._errors import UsageError
from lightning_tricks.loggers import ResumingCSVLogger, ResumingTensorBoardLogger
from lightning_tricks.logs.doctor import find_run
from lightning_tricks.logs.ledger_file import LedgerFile
from lightning_tricks.logs.run_log import read_log


def record(event):
    data = event.SerializeToString()
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def scalar(tag, step, value, seconds=1e9):
    return Event(wall_time=seconds, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))


def written(folder, *events, name="events.out.tfevents.1.a"):
    """The folder of a run with an event file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(map(record, events)))
    return folder


def points(folder, name, **names):
    series = read_log(folder, names)[0].metrics[name]
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def losses(steps, value=lambda step: 5.0 - step / 100, tag="train/loss"):
    return [scalar(tag, step, value(step), 1e9 + step) for step in steps]


# ---- event files


def test_a_record_of_two_scalars_gives_both(tmp_path):
    two = [Summary.Value(tag=tag, simple_value=value) for tag, value in (("train/loss", 2.5), ("other", 3.5))]
    run = written(tmp_path, Event(wall_time=1e9, step=7, summary=Summary(value=two)))
    assert (points(run, "train/loss"), points(run, "other")) == ([(7, 2.5)], [(7, 3.5)])


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


def test_values_in_one_record_with_others_are_read(tmp_path):
    two = [Summary.Value(tag="train/loss", simple_value=1.0), Summary.Value(tag="b", simple_value=2.0)]
    folder = written(tmp_path, Event(step=3, summary=Summary(value=two)), scalar("train/loss", 4, 0.5))
    assert points(folder, "train/loss") == [(3, 1.0), (4, 0.5)]
    assert points(folder, "b") == [(3, 2.0)]


@pytest.mark.parametrize("lost", [1, 4, 20, 45])
def test_a_file_that_is_cut_off_counts_up_to_there(tmp_path, lost):
    file = written(tmp_path, *losses(range(10))) / "events.out.tfevents.1.a"
    file.write_bytes(file.read_bytes()[:-lost])
    assert points(tmp_path, "train/loss") == [(step, pytest.approx(5 - step / 100)) for step in range(9)]


def test_points_after_a_resume_replace_those_that_came_after_its_step(tmp_path):
    mark = Event(step=5, session_log=SessionLog(status=SessionLog.START))
    written(tmp_path, *losses(range(8)), mark, *losses(range(5, 9), lambda _: 1.0))
    found = points(tmp_path, "train/loss")
    assert [step for step, _ in found] == list(range(9))
    assert [value for _, value in found[5:]] == [1.0] * 4
    assert read_log(tmp_path)[0].restarts == [5]


def test_a_second_file_goes_on_where_it_begins(tmp_path):
    written(tmp_path, *losses(range(8)))
    written(tmp_path, *losses(range(5, 7), lambda _: 1.0), name="events.out.tfevents.2.a")
    assert [step for step, _ in points(tmp_path, "train/loss")] == [0, 1, 2, 3, 4, 5, 6]
    assert read_log(tmp_path)[0].restarts == [5]


def test_two_loggers_in_one_folder_are_one_run_with_the_times_of_the_event_file(tmp_path):
    steps = range(49, 500, 50)
    written(tmp_path, *losses(steps))
    rows = "".join(f"{step},{5 - step / 100},{step}\n" for step in steps)
    (tmp_path / "metrics.csv").write_text(f"step,train/loss,own\n{rows}")
    log, _ = read_log(tmp_path)
    assert (log.restarts, log.times.steps.tolist(), log.metrics["own"].values.tolist()) == ([], [*steps], [*steps])


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger, ResumingTensorBoardLogger, ResumingCSVLogger])
def test_logs_of_every_logger_are_read(tmp_path, logger):
    short_run.fit(logger(tmp_path), 12)
    log, unread = read_log(find_run(tmp_path))
    assert log["loss"].values.tolist() == [1000 + step for step in range(12)]
    assert log["val_loss"].values.tolist() == [1004, 1009]
    assert unread == []


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


def test_a_table_is_read_up_to_its_last_whole_line(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss\n0,0,3.0,\n0,0,,4.0\n0,1,nan,\nbad\n,nan,2,2\n0,2,1"
    )
    log, _ = read_log(tmp_path)
    assert points(tmp_path, "val_loss") == [(0, 4.0)]
    assert log["loss"].steps.tolist() == [0, 1]
    assert math.isnan(log["loss"].values[1])


def test_recipe_and_ledger_are_read(tmp_path):
    written(tmp_path, *losses(range(4)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"gradient_clip_val": 0.5}}))
    ledger = LedgerFile(tmp_path / "ledger.jsonl")
    ledger.append([{"start": 0}, {"step": 0, "batch": "aa"}, {"step": 1, "batch": "bb"}, {"start": 1}])
    ledger.append([{"step": 1, "batch": "cc"}, {"step": 2, "batch": None}])
    log, unread = read_log(tmp_path)
    assert (log.settings["trainer.gradient_clip_val"], log.restarts, unread) == (0.5, [1], [])
    assert log.batches == {0: "aa", 1: "cc"}


def test_a_file_that_cannot_be_read_is_a_line_and_the_others_count(tmp_path, capsys):
    written(tmp_path, *losses(range(60)))
    (tmp_path / "events.out.tfevents.2.b").write_bytes(b"no event file at all, but some text")
    (tmp_path / "ledger.jsonl").write_text("no ledger\n")
    door.run(["doctor", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not read: ")]
    assert lines[0] == "not read: events.out.tfevents.2.b: no event file, or cut off in its first record"
    assert "holds no step of a ledger" in lines[1]


# ---- the command


def sick(folder):
    return written(folder, *losses(range(60), lambda step: math.nan if step > 30 else 5.0 - step / 100))


def test_a_healthy_run_ends_in_order_and_says_what_was_not_looked_for(tmp_path, capsys):
    door.run(["doctor", str(written(tmp_path, *losses(range(60))))])
    *_, missing, last = capsys.readouterr().out.splitlines()
    assert last == "doctor: nothing found above a note"
    assert missing.startswith("not in the log, so not looked for: val_loss (overfitting, validation leak); grad_norm")


def test_a_sick_run_exits_with_1_and_its_findings_are_text_a_page_and_json(tmp_path, capsys):
    sick(tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        door.run(["doctor", str(tmp_path), "--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")])
    assert end.value.code == 1
    text = capsys.readouterr().out
    assert "1. error: not finite\n   evidence: train/loss is nan at step 31" in text
    assert text.splitlines()[0].startswith(f"{tmp_path / 'run'}: 60 steps, training loss nan")
    record = json.loads((tmp_path / "a.json").read_text())
    assert [finding["symptom"] for finding in record["findings"]] == ["not_finite"]
    assert record["findings"][0]["score"] == 1.2
    page = (tmp_path / "a.html").read_text()
    assert page.count("<section>") == page.count("<polyline") == 1
    assert "train/loss is nan at step 31" in page
    assert "http" not in page  # it needs no other file


def test_what_a_run_has_printed_tells_how_it_ended(tmp_path, capsys):
    run, file = written(tmp_path / "run", *losses(range(9))), tmp_path / "slurm 1.out"

    def said(*lines, folder=run):
        file.write_text("Epoch 0: 10%\nINFO: an error: none\n" + "\n".join(lines) + "\n")
        with pytest.raises(SystemExit):
            door.run(["doctor", str(folder), "--stderr", str(file)])
        return capsys.readouterr().out

    behind = "HangWatchdog: rank 1 of 2 on node7 is behind: waiting for the training loader before step 4001"
    stands = "HangWatchdog: rank 0 of 2 on node7 has been in the backward of step 4001 for 300 s (limit_seconds=300)"
    hang = said(stands, "  a stack", behind, "RuntimeError: Timed out waiting 60000ms for recv operation to complete")
    assert f"1. error: hang\n   evidence: {stands}; {behind}\n" in hang
    assert hang.endswith("doctor: 1 finding\n")
    assert "error: out of memory" in said(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert "evidence: error: data=no: no such folder" in said("error: data=no: no such folder")
    assert "evidence: [rank1]: ValueError: labels" in said("[rank1]: ValueError: labels", "x.errors.ChildFailedError: ")
    early = said("KeyError: 'ids'", folder=tmp_path / "none")  # before anything was logged
    assert ("no such folder" in early, "1. error: exception" in early) == (True, True)
    file.write_text("all is well\n")
    door.run(["doctor", str(run), "--stderr", str(file)])
    with pytest.raises(UsageError, match=r"stderr=.*no\.txt: No such file"):
        door.run(["doctor", str(run), "--stderr", str(tmp_path / "no.txt")])


def test_json_alone_goes_to_standard_output(tmp_path, capsys):
    with pytest.raises(SystemExit):
        door.run(["doctor", str(sick(tmp_path)), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["run"] == str(tmp_path)


def test_names_of_another_project_can_be_given(tmp_path, capsys):
    written(tmp_path, *losses(range(60), lambda step: math.nan if step > 30 else 1.0, "my/loss"))
    written(tmp_path / "spaces", *losses(range(60), tag="my loss"))
    with pytest.raises(UsageError, match=r"among my loss: name it, such as --names 'loss=my loss'"):
        door.run(["doctor", str(tmp_path / "spaces")])
    with pytest.raises(UsageError, match=r"no training loss among my/loss: name it, such as --names loss=my/loss"):
        door.run(["doctor", str(tmp_path)])
    with pytest.raises(SystemExit):
        door.run(["doctor", str(tmp_path), "--names", "loss=my/loss"])
    assert "my/loss is nan at step 31" in capsys.readouterr().out


def test_of_several_runs_the_newest_is_taken(tmp_path):
    old = written(tmp_path / "version_0", *losses(range(9)))
    new = written(tmp_path / "version_1", *losses(range(9)))
    os.utime(old / "events.out.tfevents.1.a", (1e9, 1e9))
    assert find_run(tmp_path) == new
    assert find_run(old) == old


def test_a_run_is_taken_and_not_the_plan_in_its_folder_though_a_copy_made_that_the_newest(tmp_path):
    run = written(tmp_path / "version_0", *losses(range(9)))
    written(run / "plan", scalar("plan/lr", 0, 0.1))
    os.utime(run / "events.out.tfevents.1.a", (1e9, 1e9))
    assert find_run(tmp_path) == run
    assert find_run(run / "plan") == run / "plan"  # as asked for
