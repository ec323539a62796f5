"""All runs of a folder in one table: their figures are those of their logs, a damaged one is a row with blanks."""

import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import short_run
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from made_logs import FILE, record, run_in, scalar
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_tricks import __main__ as door
from lightning_tricks.callbacks import TensorBoardDashboard
from lightning_tricks.loggers import ResumingCSVLogger, ResumingTensorBoardLogger
from lightning_tricks.logs import run as run_module
from lightning_tricks.logs.run import ACTIVE_SECONDS, COLUMNS, Run, differing, find_runs, flat, read_run
from lightning_tricks.logs.scalars import read_scalars

ENDED = "_hparams_/session_end_info"
CSV = """\
step,train/loss,val/loss,val/bits_per_byte,goodput/steps,goodput/wall_seconds,throughput/mfu
0,9.0,,,,,
9,5.0,,,0.5,36.0,0.25
9,,4.5,2.5,,,
19,4.0,,,0.75,7200.0,0.375
19,,3.5,2.0,,,
29,4.1,,,0.7,10800.0,0.36
29,,3.75,2.25,,,
"""
CONFIG = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_tricks.LanguageModel",
        "init_args": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}},
    },
    "data": {"class_path": "TextData", "init_args": {"micro_batch_size": 4, "seq_len": 8}},
    "trainer": {"max_steps": 30, "devices": 3, "num_nodes": 2, "accumulate_grad_batches": 5},
}


def written(folder, text=CSV, config=CONFIG, lr=None, **trainer):
    """The folder of a run with these files."""
    config = json.loads(json.dumps(config))
    if config is not None:
        config["trainer"] |= trainer
    if lr is not None:
        config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = lr
    return run_in(folder, text, config)


# ---- one run


def test_a_run_has_the_figures_of_its_log(tmp_path):
    run = read_run(written(tmp_path / "version_0"))
    assert (run.name, run.state, run.steps) == ("version_0", "finished", 30)
    assert (run.val_loss, run.best_val_loss, run.best_step) == (3.75, 3.5, 20)
    assert (run.bits_per_byte, run.best_bits_per_byte) == (2.25, 2.0)
    assert run.tokens == 4 * 8 * 5 * 6 * 30  # rows x length x accumulation x processes x steps
    assert (run.hours, run.goodput, run.mfu) == (3.0, 0.7, 0.36)


@pytest.mark.parametrize(
    ("trainer", "tokens"),
    [
        ({"devices": "auto"}, None),  # those of another machine
        ({"devices": "auto", "accelerator": "cpu", "num_nodes": 1}, 160 * 30),
        ({"devices": [0, 1], "num_nodes": 1}, 2 * 160 * 30),
        (
            {"devices": 8, "num_nodes": 1, "strategy": {"init_args": {"mesh": {"tensor": 2, "context": 2}}}},
            2 * 160 * 30,
        ),
        ({"callbacks": [{"class_path": "lightning_tricks.BatchSizeWarmup"}]}, None),  # and the log has no batches
    ],
)
def test_tokens_are_those_of_processes_with_rows_of_their_own_or_not_known(tmp_path, trainer, tokens):
    assert read_run(written(tmp_path, **trainer)).tokens == tokens


def test_an_elastic_run_has_the_tokens_of_its_recipe_on_however_many_processes(tmp_path):
    """4 x 8 tokens, 5 micro-batches, 3 x 2 processes by the recipe; the log is that of a start on three of them."""
    text = Event(step=0, summary=Summary(value=[Summary.Value(tag="t", tensor={"string_val": [b"| devices | 3 |"]})]))
    loss = scalar("train/loss", 29, 2.0)
    for elastic, processes in ((True, 6), (False, 3)):
        folder = written(tmp_path / str(elastic), None, CONFIG | {"elastic": elastic})
        (folder / FILE).write_bytes(record(text) + record(loss))
        assert read_run(folder).tokens == 4 * 8 * 5 * processes * 30


def test_the_tokens_of_a_batch_that_grows_are_those_of_every_step(tmp_path):
    rows = "".join(f"{step},{1.0},{32.0 if step < 2 else 64.0}\n" for step in range(4))
    callbacks = [{"class_path": "lightning_tricks.callbacks.BatchSizeWarmup"}]
    folder = written(tmp_path, "step,train/loss,train/batch_tokens\n" + rows, callbacks=callbacks)
    assert read_run(folder).tokens == 2 * 32 + 2 * 64


def test_the_state_is_told_by_the_length_the_loss_and_the_last_write(tmp_path):
    folder = written(tmp_path, max_steps=100)
    now = (folder / "metrics.csv").stat().st_mtime
    assert read_run(folder, now=now + ACTIVE_SECONDS - 1).state == "active"
    assert read_run(folder, now=now + ACTIVE_SECONDS + 1).state == "stopped"
    assert read_run(written(tmp_path / "nan", CSV + "39,nan,,,,,\n")).state == "failed"
    for after, state in (("20,13", "finished"), ("4,20", "finished"), ("20,14", "diverged")):
        rows = "".join(f"{29 + number},{loss}\n" for number, loss in enumerate(after.split(",")))
        assert read_run(written(tmp_path / after, f"step,train/loss\n0,9\n28,20\n{rows}")).state == state
    assert read_run(written(tmp_path / "new", "step,train/loss\n")).state == "empty"


def test_a_start_that_has_written_nothing_yet_follows_one_that_ended(tmp_path):
    (tmp_path / FILE).write_bytes(record(scalar("train/loss", 4, 2.0)) + record(scalar(ENDED, 0, 0.0)))
    assert read_run(tmp_path).state == "finished"
    (tmp_path / "events.out.tfevents.2.a").touch()
    assert read_run(tmp_path).state == "active"


def test_a_val_loss_that_is_no_number_is_never_the_best(tmp_path):
    run = read_run(written(tmp_path, "step,val/loss\n4,nan\n9,2.0\n14,nan\n"))
    assert (run.best_val_loss, run.best_step) == (2.0, 10)
    assert math.isnan(run.val_loss)


def test_checkpoints_tell_the_steps_where_the_log_ends_before_them(tmp_path):
    folder = written(tmp_path)
    (folder / "checkpoints").mkdir()
    for name in ("epoch=0-step=35.ckpt", "step=9.ckpt", "last.ckpt"):
        (folder / "checkpoints" / name).touch()
    assert read_run(folder).steps == 35


@pytest.mark.parametrize(
    ("text", "steps", "best"),
    [
        ("", None, None),
        ("step,val/loss\n", None, None),
        ("step,val/loss\n4,1.5\n9,", 5, 1.5),  # cut short
        ("step,val/loss\n4,1.5\n9\n14,2.5,7\nx,0.1\nnan,0.1\n19,abc\n", 20, 1.5),
        ("epoch,loss\n1,2\n", None, None),
        ("\x00\x01\xff", None, None),
    ],
)
def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path, text, steps, best):
    run = read_run(written(tmp_path, text, None))
    assert (run.steps, run.best_val_loss) == (steps, best)
    assert run.settings == {}


def test_settings_are_read_whatever_they_hold(tmp_path):
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\nact: !!python/name:torch.nn.GELU ''\nw: !Own {a: 1}\n")
    assert read_run(tmp_path).settings == {"lr": 0.1, "act": "torch.nn.GELU", "w": "Own"}
    (tmp_path / "config.yaml").write_text("a: [1\n")  # cut off: the hyper-parameters stand in for it
    assert read_run(tmp_path).settings["lr"] == 0.1
    assert read_run(written(tmp_path / "b")).settings["model.optimizer.lr"] == 1e-3


def test_settings_have_dotted_names_and_classes_are_values():
    callbacks = [{"class_path": "a.EMA", "init_args": {"decay": 0.9}}, {"class_path": "a.StepGuard"}]
    found = flat(
        {"trainer": {"callbacks": callbacks, "devices": 2}, "x": {"class_path": "b.Y", "init_args": {"z": None}}}
    )
    assert found == {
        "trainer.callbacks": "EMA, StepGuard", "trainer.callbacks.EMA.decay": 0.9, "trainer.devices": 2,
        "x": "Y", "x.z": None,
    }  # fmt: skip


# ---- runs of Lightning's loggers and of ours


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """One run of 19 steps with each logger; with ours, a resume from step 10 that ends at step 12."""
    folder = tmp_path_factory.mktemp("logged")
    loggers = {
        "csv": CSVLogger(folder, "", "csv"),
        "events": TensorBoardLogger(folder, "", "events"),
        "resuming": ResumingTensorBoardLogger(folder, "", "resuming"),
        "ours": ResumingCSVLogger(folder, "", "ours"),
    }
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=10, save_top_k=-1)
    short_run.fit(list(loggers.values()), 19, callbacks=(saver, TensorBoardDashboard()), enable_checkpointing=True)
    for name in ("resuming", "ours"):
        logger = type(loggers[name])(folder, "", name)
        short_run.fit(logger, 12, model=short_run.Model(run=2), ckpt_path=folder / "saved/step=10.ckpt")
    return folder


@pytest.mark.parametrize(
    ("name", "steps", "val_loss", "best_step"),
    # `val/loss` is 1000 x the number of the start + the step of the loggers, and validation comes after every 5th step
    [("csv", 19, 1014.0, 5), ("events", 19, 1014.0, 5), ("resuming", 12, 1009.0, 5), ("ours", 12, 1009.0, 5)],
)
def test_each_logger_tells_the_same(logged, name, steps, val_loss, best_step):
    run = read_run(logged / name)
    assert (run.steps, run.val_loss, run.best_val_loss, run.best_step) == (steps, val_loss, 1004.0, best_step)
    assert (run.hours is not None) == (name in ("events", "resuming"))  # a table has no times


def test_the_dashboards_events_tell_that_a_run_ended_and_its_processes(logged):
    assert read_run(logged / "events").state == "finished"
    assert read_run(logged / "resuming").state == "active"  # the second start had no dashboard
    found = read_scalars(logged / "events", {"val/loss", "train/loss"})
    assert found.series("val/loss") == {4: 1004.0, 9: 1009.0, 14: 1014.0}
    assert (found.last("train/loss"), set(found.metrics)) == (1018.0, {"val/loss", "train/loss"})
    assert found.facts.devices == 1
    assert found.facts.first_time <= found.facts.last_time


# ---- the table


@pytest.fixture
def three(tmp_path):
    written(tmp_path / "a/version_2", lr=1e-3)
    written(tmp_path / "a/version_10", CSV.replace("3.5", "3.25"), lr=3e-3)
    written(tmp_path / "b/version_0", None, None)
    return tmp_path


def test_the_runs_of_a_folder_are_sorted_and_show_the_settings_that_differ(three, capsys):
    door.run(["runs", str(three)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "name", "lr", "best", "loss", "at", "step", "state", "steps", "val", "loss", "bits/byte", "best", "bits",
        "tokens", "hours", "goodput", "mfu",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == ["a/version_10", "a/version_2", "b/version_0"]
    assert lines[1].split()[1:] == [
        "0.003", "3.2500", "20", "finished", "30", "3.7500", "2.2500", "2.0000", "28,800", "3.00", "70.0%", "36.0%",
    ]  # fmt: skip
    assert lines[3].split() == ["b/version_0", "empty"]
    door.run(["runs", str(three), "--sort", "name"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]][:2] == ["a/version_2", "a/version_10"]
    door.run(["runs", str(three), "--sort=lr", "--descending"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]][:2] == ["a/version_10", "a/version_2"]


def test_a_callback_that_is_taken_out_is_one_setting_that_differs():
    sample = {"class_path": "SampleText", "init_args": {"seed": 0}}
    guard, wide = ({"class_path": "StepGuard", "init_args": {"sigmas": sigmas}} for sigmas in (6, 8))
    runs = [SimpleNamespace(settings=flat({"trainer": {"callbacks": each}})) for each in ([sample, guard], [wide])]
    assert differing(runs) == {"callbacks": "trainer.callbacks", "sigmas": "trainer.callbacks.StepGuard.sigmas"}


def test_a_narrow_table_goes_without_the_columns_that_matter_least_and_names_them(three, capsys, monkeypatch):
    long = written(three / "-".join(["a_name_longer_than_the_terminal"] * 3) / "version_7", lr=1e-2)
    monkeypatch.setenv("COLUMNS", "60")
    door.run(["runs", str(three)])
    heads, *_, blank, left_out, more = lines = capsys.readouterr().out.splitlines()
    assert heads.split() == ["name", "lr", "best", "loss", "state"]
    assert f"...{str(long.relative_to(three))[-27:]}" in [line.split()[0] for line in lines if line]
    assert (blank, left_out[:20]) == ("", "no room for: at step")
    assert more.endswith("mfu (--json has all)")
    assert all(len(line) <= 60 for line in lines)
    door.run(["runs", str(three), "--sort", "goodput"])
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "lr", "state", "goodput"]


def test_a_setting_that_differs_has_room_before_what_all_runs_share(tmp_path, capsys, monkeypatch):
    for number, paths in enumerate(("a" * 30, "b" * 30)):
        written(tmp_path / f"version_{number}", lr=(number + 1) * 1e-3, default_root=paths)
    monkeypatch.setenv("COLUMNS", "45")
    door.run(["runs", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "lr", "default_root", "best", "loss"]
    assert f"  {'a' * 10}" in lines[1]
    assert "no room for: at step, state, steps" in lines[4]
    assert max(map(len, lines)) <= 45


@pytest.mark.parametrize(("last", "state"), [("nan", "failed"), ("20", "diverged")])
def test_a_run_that_diverged_is_red(tmp_path, capsys, monkeypatch, last, state):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "")
    written(tmp_path, f"step,train/loss\n0,9\n1,20\n2,20\n3,{last}\n")
    door.run(["runs", str(tmp_path)])
    assert f"\x1b[31m{state}" in capsys.readouterr().out


def test_a_mixture_has_the_last_validation_of_each_source(tmp_path, capsys):
    heads = "step,val/loss,sources/web/val_loss,sources/web/bits_per_byte,sources/a/bits_per_byte,sources/web/tokens\n"
    written(tmp_path / "mix", heads + "9,4,4.5,2.5,1.5,80\n19,3,3.5,2.25,1.25,160\n")
    written(tmp_path / "nats", "step,val/loss,sources/web/val_loss\n9,4,4.5\n")
    assert read_run(tmp_path / "mix").sources == {"a": 1.25, "web": 2.25}
    assert read_run(tmp_path / "nats").sources == {"web": 4.5}
    assert read_run(written(tmp_path / "plain")).sources is None
    door.run(["runs", str(tmp_path)])
    assert "a 1.2500  web 2.2500" in capsys.readouterr().out


def test_json_has_every_column_and_numbers(three, capsys):
    written(three / "c", "step,val/loss\n0,inf\n", None)
    door.run(["runs", str(three), "--json", "-"])
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == ["a/version_10", "a/version_2", "b/version_0", "c"]
    assert set(records[0]) == {*COLUMNS, "settings"}
    assert records[0]["tokens"] == 28_800
    assert records[0]["settings"] == {"model.optimizer.lr": 0.003}
    assert records[3]["val_loss"] is None  # JSON has no infinity
    rest = {name: value for name, value in records[0].items() if name not in ("settings", "tokens")}
    assert rest == {
        "name": "a/version_10", "state": "finished", "steps": 30, "val_loss": 3.75, "best_val_loss": 3.25,
        "best_step": 20, "bits_per_byte": 2.25, "best_bits_per_byte": 2.0, "sources": None, "hours": 3.0,
        "goodput": 0.7, "mfu": 0.36,
    }  # fmt: skip


def test_a_setting_has_the_shortest_name_that_is_its_own():
    one = {"model.optimizer.lr": 1, "data.lr": 2, "model.width": 3, "trainer.steps": 1, "same": 0}
    other = {"model.optimizer.lr": 2, "data.lr": 3, "model.width": 4, "trainer.steps": 2, "same": 0, "more": 1}
    runs = [Run("a", "", settings=one), Run("b", "", settings=other), Run("c", "")]
    assert differing(runs) == {
        "data.lr": "data.lr", "more": "more", "optimizer.lr": "model.optimizer.lr", "width": "model.width",
        "trainer.steps": "trainer.steps",
    }  # fmt: skip


def test_a_folder_of_one_run_is_a_table_of_one_row_and_subfolders_of_a_run_are_none(three):
    folder = three / "a/version_2"
    written(folder / "plan")
    assert [run.name for run in find_runs(folder)] == ["version_2"]
    os.makedirs(three / ".hidden/version_0")
    assert len(find_runs(three)) == 3


def test_what_validate_writes_beside_the_runs_is_no_run(tmp_path):
    run = written(tmp_path / "tiny" / "version_0")
    later = written(tmp_path / "tiny" / "validate", "step,val/loss\n5,1.0\n")
    assert [found.name for found in find_runs(tmp_path)] == ["tiny/version_0"]
    assert run_module.find_run(tmp_path) == run
    assert run_module.find_run(later) == later  # as asked for
    own = written(tmp_path / "test" / "version_0")  # a logger's name may be any
    assert run_module.find_run(tmp_path / "test") == own
    assert len(find_runs(tmp_path)) == 2


def test_another_projects_names_are_found_or_can_be_given(tmp_path, capsys):
    folder = written(tmp_path, "step,val_loss,my_score\n9,2.0,7.0\n", None)
    assert read_run(folder).best_val_loss == 2.0
    assert read_run(folder, names={"val_loss": "my_score"}).best_val_loss == 7.0
    written(tmp_path / "b", "step,val_loss,my_loss\n9,2.0,nan\n", None)
    assert [read_run(tmp_path / "b", names=names).state for names in ({}, {"loss": "my_loss"})] == ["active", "failed"]
    door.run(["runs", str(tmp_path / "b"), "--names", "val_loss=my_score", "loss=my_loss"])
    assert re.search(r"^b +failed +10$", capsys.readouterr().out, re.MULTILINE)


def test_options_of_validate_are_no_settings(tmp_path):
    written(tmp_path, None, None)
    (tmp_path / "hparams.yaml").write_text("json: a.json\ntext: b.txt\nverbose: true\ntext_field: text\nresume: auto\n")
    assert read_run(tmp_path).settings == {"text_field": "text"}


def test_a_run_that_cannot_be_read_is_a_row_and_a_line_and_the_others_stand(three, capsys, monkeypatch):
    """A folder that may be listed and not entered is met as the root user by hand."""
    written(three / "aliases")
    (three / "aliases" / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    (three / "closed").mkdir()
    entered = run_module.is_run

    def is_run(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path / "metrics.csv"))
        return entered(path)

    monkeypatch.setattr(run_module, "is_run", is_run)
    door.run(["runs", str(three)])
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + 5
    assert re.search(r"^closed +unreadable$", printed.out, re.MULTILINE)
    assert printed.err.splitlines() == [
        "not read: aliases: config.yaml: line 2: the alias *a: write its values out",
        "not read: closed: Permission denied",
    ]
