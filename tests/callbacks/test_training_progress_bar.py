"""The progress line: what it shows, when it prints, and that it changes nothing."""

import math
import re

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import TrainingProgressBar
from lightning_tricks.callbacks.training_progress_bar import clock, human, tokens_in


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        self.log("train/loss", float(self.global_step + 1))
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 7.0)

    def on_train_batch_end(self, *_):
        self.log("train/grad_norm", 100.0 + self.global_step)
        self.log("train/lr", 3e-4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(bar, **kwargs) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 3, 4)), batch_size=2)
    options = {"max_steps": 6, "log_every_n_steps": 2, "val_check_interval": 4, "limit_val_batches": 1}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=bar is not None, callbacks=bar, num_sanity_val_steps=0, **{**options, **kwargs},
    )  # fmt: skip
    trainer.fit(model, data, data)
    return [p.detach() for p in model.parameters()]


def steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ") and "validation" not in line]


def test_prints_one_line_an_interval_with_that_steps_own_values(capsys):
    run(TrainingProgressBar())
    lines = steps(capsys.readouterr().out)
    assert [re.match(r"step (\d+)/6 \((\d+)%\)", line).groups() for line in lines] == [
        ("2", "33"),
        ("4", "67"),
        ("6", "100"),
    ]
    assert [re.search(r"loss ([\d.]+)  norm ([\d.]+)", line).groups() for line in lines] == [
        ("2.0000", "102.000"),
        ("4.0000", "104.000"),
        ("6.0000", "106.000"),
    ]
    assert all("lr 3.0e-04" in line and "tokens/s" in line for line in lines)
    assert lines[-1].endswith("ETA 0:00:00")


def test_validation_has_a_line_of_its_own(capsys):
    run(TrainingProgressBar())
    assert "step 4  validation  loss 7.0000" in capsys.readouterr().out


def test_with_accumulation_a_step_prints_once(capsys):
    run(TrainingProgressBar(), accumulate_grad_batches=3, max_steps=4, val_check_interval=20)
    assert [line.split()[1] for line in steps(capsys.readouterr().out)] == ["2/4", "4/4"]


def test_without_a_last_step_there_is_no_eta(capsys):
    run(TrainingProgressBar(), max_steps=-1, max_epochs=1, val_check_interval=20)
    lines = steps(capsys.readouterr().out)
    assert lines
    assert not any("ETA" in line for line in lines)


def test_training_is_bitwise_unchanged():
    assert all(torch.equal(a, b) for a, b in zip(run(TrainingProgressBar()), run(None), strict=True))


def test_a_disabled_bar_is_silent(capsys):
    bar = TrainingProgressBar()
    bar.disable()
    run(bar)
    assert not steps(capsys.readouterr().out)


def test_on_a_terminal_the_line_is_redrawn(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    run(TrainingProgressBar())
    assert capsys.readouterr().out.count("\r\x1b[2Kstep ") >= 3


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (12345, "12.3k"), (999_900, "1M"), (2.5e6, "2.5M"), (3e15, "3P")]
)
def test_numbers_have_three_digits_and_a_suffix(value, text):
    assert human(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (math.nan, "?")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_tokens_are_counted_in_tensors_tuples_and_dicts():
    ids = torch.zeros(3, 5)
    assert tokens_in(ids) == tokens_in((ids, ids)) == tokens_in({"n": torch.zeros(3), "input_ids": ids}) == 15
    assert tokens_in(torch.zeros(3)) == tokens_in("text") == 0
