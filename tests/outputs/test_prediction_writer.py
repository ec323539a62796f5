"""PredictionWriter: each row of each batch is a line, and a file that exists is kept."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tricks import PredictionWriter
from lightning_tricks._errors import UsageError
from lightning_tricks._lightning import pl
from lightning_tricks.outputs.prediction_writer import rows_of

TWO = torch.tensor([[1, 2], [3, 4]])
BOXES = [[[1, 2], [3, 4]], [1, 2], None]


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
        (torch.tensor(2), [2]),
        (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        ((torch.tensor([1, 2]), torch.tensor([[3], [4]])), [[1, [3]], [2, [4]]]),
        ("a text", ["a text"]),
        (["a", "b"], [["a", "b"]]),
        (None, [None]),
        ({"ids": TWO, "text": ["a", "b"]}, [{"ids": [1, 2], "text": "a"}, {"ids": [3, 4], "text": "b"}]),
        ({"ids": TWO, "loss": torch.tensor(0.5)}, [{"ids": [1, 2], "loss": 0.5}, {"ids": [3, 4], "loss": 0.5}]),
        ((TWO, ["a", "b"]), [[[1, 2], "a"], [[3, 4], "b"]]),
        ((TWO, None, 7), [[[1, 2], None, 7], [[3, 4], None, 7]]),
        ({"loss": 1.5, "text": ["a", "b"]}, [{"loss": 1.5, "text": ["a", "b"]}]),
        ({"ids": TWO, "layers": (TWO, TWO)}, [{"ids": i, "layers": [i, i]} for i in TWO.tolist()]),
        ({"x": torch.ones(3), "boxes": [TWO, TWO[0], None]}, [{"x": 1, "boxes": b} for b in BOXES]),
        (
            {"x": TWO[0], "boxes": [torch.ones(2), torch.zeros(3)]},  # the boxes of each row are a tensor
            [{"x": 1, "boxes": [1, 1]}, {"x": 2, "boxes": [0, 0, 0]}],
        ),
        ([{"boxes": torch.zeros(2000)}, {"boxes": torch.ones(1)}], [{"boxes": [0] * 2000}, {"boxes": [1]}]),
        ([["a"], np.arange(3), np.float32(0.5)], [[["a"], [0, 1, 2], 0.5]]),
        ({1: Path("file"), 2: 1j}, [{"1": "file", "2": "1j"}]),
        (torch.tensor([[1, math.nan], [math.inf, 2]]), [[1, None], [None, 2]]),
        (torch.tensor([-math.inf, 0.5], dtype=torch.float16), [None, 0.5]),
        ({"x": np.array([math.nan, 1]), "y": -math.inf}, [{"x": [None, 1], "y": None}]),
        (np.float32("nan"), [None]),
    ],
)  # fmt: skip
def test_rows_of_a_batch(prediction, rows):
    assert rows_of(prediction) == rows
    json.dumps(rows_of(prediction), allow_nan=False)


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        (
            [torch.ones(5), torch.ones(3)],
            r"^predict_step: '\[0\]' has 5 rows and '\[1\]' has 3: .* a list of dicts, one for",
        ),
        ({"ids": TWO, "names": ["a"]}, r"^predict_step: 'ids' has 2 rows and 'names' has 1: "),
        ({"x": SimpleNamespace(ids=TWO)}, r"^predict_step: a SimpleNamespace cannot be written to JSON: "),
    ],
)
def test_what_cannot_be_written_exactly_is_refused_in_one_line(prediction, line):
    with pytest.raises(UsageError, match=line):
        rows_of(prediction)


def test_lines_of_several_loaders_say_of_which(tmp_path):
    predict(PredictionWriter(str(tmp_path / "p.jsonl")), torch.ones(3, 2), torch.ones(1, 2))
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    places = [(line["dataloader"], line["batch"], line["row"]) for line in lines]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_another_ending_or_a_folder_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"output='p.pt': .* end the name in .jsonl"):
        PredictionWriter("p.pt")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        predict(PredictionWriter(str(tmp_path / "file" / "p.jsonl")), torch.ones(2, 2))
