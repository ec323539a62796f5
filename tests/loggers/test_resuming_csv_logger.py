"""After a resume `metrics.csv` goes on, each step once; nothing that was there is lost."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from short_run import Model, Raise, fit, save_every

from lightning_tricks.loggers import ResumingCSVLogger

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning on resuming in mid-epoch


def logger(folder, **options) -> ResumingCSVLogger:
    return ResumingCSVLogger(folder, **{"name": "run", "version": "", **options})


def rows(folder) -> list[dict[str, str]]:
    with open(folder / "run" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def values(folder, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows(folder) if row[name]]


@pytest.mark.parametrize("first", [logger, lambda folder: CSVLogger(folder, name="run", version="")])
def test_a_replayed_step_stands_once_with_the_resumed_runs_value(tmp_path, first):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(first(tmp_path), 20, callbacks=(save_every(10, tmp_path), Raise(17)), enable_checkpointing=True)
    assert values(tmp_path, "train/loss") == [(step, 1000.0 + step) for step in range(17)]
    fit(logger(tmp_path), 20, model=Model(run=2), ckpt_path=tmp_path / "step=10.ckpt")
    assert values(tmp_path, "train/loss") == [(step, 1000.0 * (1 if step < 10 else 2) + step) for step in range(20)]
    assert values(tmp_path, "val/loss") == [(4, 1004), (9, 1009), (14, 2014), (19, 2019)]


def test_a_fresh_start_in_a_used_folder_begins_anew(tmp_path):
    fit(logger(tmp_path), 9)
    fit(logger(tmp_path), 6, model=Model(run=2))
    assert values(tmp_path, "train/loss") == [(step, 2000.0 + step) for step in range(6)]


def test_a_validation_before_the_fit_keeps_its_row(tmp_path):
    one = logger(tmp_path)
    one.log_metrics({"val/loss": 7.0}, 0)
    one.save()
    one.resume_at(0)
    one.log_metrics({"train/loss": 1.0}, 0)
    one.finalize("success")
    assert values(tmp_path, "val/loss") == [(0, 7)]
    one.resume_at(0)  # a second fit with the same logger, from the beginning
    assert rows(tmp_path) == []


def test_new_metrics_get_columns_and_old_rows_keep_their_numbers(tmp_path):
    one = logger(tmp_path)
    one.log_metrics({"b": 0.1 + 0.2, "text": float("nan")}, 0)
    one.finalize("success")
    two = logger(tmp_path)
    two.resume_at(1)
    two.log_metrics({"a": 1.0}, 1)
    two.log_metrics({"b": 2.0}, 2)
    two.finalize("success")
    assert values(tmp_path, "b") == [(0, 0.1 + 0.2), (2, 2)]
    assert values(tmp_path, "a") == [(1, 1)]
    assert [row["text"] for row in rows(tmp_path)] == ["nan", "", ""]


@pytest.mark.parametrize("fits", [True, False])  # False: as `trainer.validate`, which never calls `resume_at`
@pytest.mark.parametrize("cut", [1, 3])  # between the two characters of a line's end, or within the number
def test_a_row_that_was_cut_short_is_dropped_before_the_first_append(tmp_path, fits, cut):
    one = logger(tmp_path)
    for step in range(3):
        one.log_metrics({"x": 1.0 + step}, step)
    one.finalize("success")
    file = tmp_path / "run" / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-cut])
    two = logger(tmp_path)
    if fits:
        two.resume_at(5)
    two.log_metrics({"x": 9.0}, 5)
    two.finalize("success")
    assert values(tmp_path, "x") == [(0, 1), (1, 2), (5, 9)]
    logger(tmp_path).resume_at(5)
    assert values(tmp_path, "x") == [(0, 1), (1, 2)]


@pytest.mark.parametrize("columns", ["a", "a,b"])  # cut within the header, or after it
def test_a_file_without_rows_is_no_obstacle(tmp_path, columns):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text(columns)
    one = logger(tmp_path)
    one.resume_at(0)
    one.log_metrics({"x": 1.0}, 0)
    one.finalize("success")
    assert values(tmp_path, "x") == [(0, 1)]


def test_a_failed_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    one = logger(tmp_path)
    one.log_metrics({"x": 1.0}, 0)
    one.finalize("success")
    before = (tmp_path / "run" / "metrics.csv").read_bytes()

    def disk_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", disk_full)
    with pytest.raises(OSError, match="no space"):
        logger(tmp_path).resume_at(0)
    wider = logger(tmp_path)
    wider.log_metrics({"new": 1.0}, 1)
    with pytest.raises(OSError, match="no space"):
        wider.save()
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_rows_without_a_step_are_kept_and_steps_may_be_written_as_floats(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("step,x\n,1\n3.0,2\n4.0,3\nnote,4\n")
    one = logger(tmp_path)
    one.resume_at(4)
    assert [row["x"] for row in rows(tmp_path)] == ["1", "2", "4"]
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["metrics.csv"]


def test_without_a_fit_rows_are_appended(tmp_path):
    for value in (1.0, 2.0):
        one = logger(tmp_path)
        one.log_metrics({"test/loss": value}, 5)
        one.finalize("success")
    assert values(tmp_path, "test/loss") == [(5, 1), (5, 2)]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    one = logger(tmp_path)
    one.log_metrics({"x": 1.0}, 0)
    one.log_graph(Model())
    one.resume_at(3)
    one.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_hyperparameters_are_written_as_lightning_does(tmp_path):
    one = logger(tmp_path)
    one.log_hyperparams({"lr": 0.5})
    assert "lr: 0.5" in (tmp_path / "run" / "hparams.yaml").read_text()


def test_training_is_bitwise_unchanged(tmp_path):
    with_it = fit(logger(tmp_path), 6).lightning_module
    without = fit(False, 6).lightning_module
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))
