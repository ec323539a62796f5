"""PredictionWriter: each row of each batch is a line, and a file that exists is kept."""

import json
import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tricks import PredictionWriter
from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.outputs.prediction_writer import rows_of

TWO = torch.tensor([[1, 2], [3, 4]])


class Doubles(pl.LightningModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        if batch[0, 0] < 0:
            raise RuntimeError("negative")
        return {"twice": 2 * batch, "sum": batch.sum(dim=1)}


def predict(writer, *data):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=[writer], enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.predict(Doubles(), [DataLoader(rows, batch_size=2) for rows in data], return_predictions=False)


def test_each_row_is_a_line_in_the_order_of_the_data(tmp_path):
    predict(PredictionWriter(str(tmp_path / "new" / "p.jsonl")), torch.arange(6.0).view(3, 2))
    lines = [json.loads(line) for line in (tmp_path / "new" / "p.jsonl").read_text().splitlines()]
    assert lines == [
        {"batch": 0, "row": 0, "prediction": {"twice": [0.0, 2.0], "sum": 1.0}},
        {"batch": 0, "row": 1, "prediction": {"twice": [4.0, 6.0], "sum": 5.0}},
        {"batch": 1, "row": 0, "prediction": {"twice": [8.0, 10.0], "sum": 9.0}},
    ]


def test_an_existing_file_is_kept(tmp_path):
    (tmp_path / "p.jsonl").write_text("mine")
    with pytest.raises(UsageError, match=r"p.jsonl' exists: name another file with --output"):
        predict(PredictionWriter(str(tmp_path / "p.jsonl")), torch.ones(2, 2))
    assert (tmp_path / "p.jsonl").read_text() == "mine"


def test_what_was_written_before_an_error_is_there(tmp_path):
    data = torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    with pytest.raises(RuntimeError, match="negative"):
        predict(PredictionWriter(str(tmp_path / "p.jsonl")), data)
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("prediction", "rows"),
    [
        (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        ({"ids": TWO, "last": torch.tensor([7, 8])}, [{"ids": [1, 2], "last": 7}, {"ids": [3, 4], "last": 8}]),
        (torch.tensor([[1, math.nan], [math.inf, 2]]), [[1, None], [None, 2]]),
        (torch.tensor([-math.inf, 0.5], dtype=torch.float16), [None, 0.5]),
        ({"x": torch.tensor([math.nan, 1]).bfloat16()}, [{"x": None}, {"x": 1}]),
    ],
)  # fmt: skip
def test_rows_of_a_batch(prediction, rows):
    assert rows_of(prediction) == rows
    json.dumps(rows_of(prediction), allow_nan=False)


def test_lines_of_several_loaders_say_of_which(tmp_path):
    predict(PredictionWriter(str(tmp_path / "p.jsonl")), torch.ones(3, 2), torch.ones(1, 2))
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    places = [(line["dataloader"], line["batch"], line["row"]) for line in lines]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        predict(PredictionWriter(str(tmp_path / "file" / "p.jsonl")), torch.ones(2, 2))
