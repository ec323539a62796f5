"""After a resume `metrics.csv` goes on, each step once; nothing that was there is lost."""

import csv

import pytest

from lightning_tricks.loggers import ResumingCSVLogger

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning on resuming in mid-epoch


def logger(folder, **options) -> ResumingCSVLogger:
    return ResumingCSVLogger(folder, **{"name": "run", "version": "", **options})


def write(folder, *metrics: tuple[dict[str, float], int], resume: int | None = None) -> None:
    """Another start of a program, which logs these metrics, each with its step."""
    one = logger(folder)
    if resume is not None:
        one.resume_at(resume)
    for each, step in metrics:
        one.log_metrics(each, step)
    one.finalize("success")


def rows(folder) -> list[dict[str, str]]:
    with open(folder / "run" / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def values(folder, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows(folder) if row[name]]


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
    write(tmp_path, ({"b": 0.1 + 0.2, "text": float("nan")}, 0))
    write(tmp_path, ({"a": 1.0}, 1), ({"b": 2.0}, 2), resume=1)
    assert values(tmp_path, "b") == [(0, 0.1 + 0.2), (2, 2)]
    assert values(tmp_path, "a") == [(1, 1)]
    assert [row["text"] for row in rows(tmp_path)] == ["nan", "", ""]


@pytest.mark.parametrize("fits", [True, False])  # False: as `trainer.validate`, which never calls `resume_at`
@pytest.mark.parametrize("cut", [1, 3])  # between the two characters of a line's end, or within the number
def test_a_row_that_was_cut_short_is_dropped_before_the_first_append(tmp_path, fits, cut):
    write(tmp_path, *(({"x": 1.0 + step}, step) for step in range(3)))
    file = tmp_path / "run" / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-cut])
    write(tmp_path, ({"x": 9.0}, 5), resume=5 if fits else None)
    assert values(tmp_path, "x") == [(0, 1), (1, 2), (5, 9)]
    logger(tmp_path).resume_at(5)
    assert values(tmp_path, "x") == [(0, 1), (1, 2)]


@pytest.mark.parametrize("columns", ["a", "a,b"])  # cut within the header, or after it
def test_a_file_without_rows_is_no_obstacle(tmp_path, columns):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text(columns)
    write(tmp_path, ({"x": 1.0}, 0), resume=0)
    assert values(tmp_path, "x") == [(0, 1)]


def test_a_failed_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, ({"x": 1.0}, 0))
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
        write(tmp_path, ({"test/loss": value}, 5))
    assert values(tmp_path, "test/loss") == [(5, 1), (5, 2)]
