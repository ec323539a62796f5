"""The compressors' figures are those of zlib and xz, and the crossing is the first validation below them."""

import lzma
import random
import zlib
from types import SimpleNamespace

import pytest
import torch

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import CompressionBaseline
from lightning_tricks.outputs.compression_baseline import xz_bits_per_byte, zlib_bits_per_byte

WORDS = random.Random(0)
TEXT = " ".join(WORDS.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(3000)).encode()
BEFORE = " ".join(WORDS.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(9000)).encode()


class FakeTrainer(SimpleNamespace):
    is_global_zero = True
    sanity_checking = False


def trainer(bits: float, step: int) -> FakeTrainer:
    data = SimpleNamespace(validation_text=lambda: TEXT, training_text=lambda: BEFORE)
    metrics = {"val/bits_per_byte": torch.tensor(bits)}
    return FakeTrainer(datamodule=data, callback_metrics=metrics, global_step=step, state=SimpleNamespace(fn="fit"))


def test_zlib_counts_the_compressed_size():
    assert zlib_bits_per_byte(TEXT) == 8 * len(zlib.compress(TEXT, 9)) / len(TEXT)


def test_xz_after_other_text_counts_what_is_added():
    preset = 9 | lzma.PRESET_EXTREME
    added = len(lzma.compress(BEFORE + TEXT, preset=preset)) - len(lzma.compress(BEFORE, preset=preset))
    assert xz_bits_per_byte(TEXT, BEFORE) == 8 * added / len(TEXT)
    assert xz_bits_per_byte(TEXT, TEXT) < 0.2 * xz_bits_per_byte(TEXT)


def test_prints_the_figures_and_when_each_was_crossed(capsys):
    baseline = CompressionBaseline(xz=True)
    for bits, step in [(8.0, 10), (zlib_bits_per_byte(TEXT) - 0.01, 20), (zlib_bits_per_byte(TEXT) - 0.02, 30)]:
        baseline.on_validation_end(trainer(bits, step), None)
    baseline.history[1] = (20, 150.0, *baseline.history[1][2:])
    baseline.on_fit_end(trainer(1.0, 30), None)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "zlib -9" in line)
    assert f"{zlib_bits_per_byte(TEXT):.4f}" in row
    assert "crossed by step 20, 2.5 min" in row
    assert sum("xz -9e" in line for line in lines) == 2
    assert f"{zlib_bits_per_byte(TEXT) - 0.02:.4f}  at step 30" in "".join(lines)


def test_a_line_not_reached_is_said_so(capsys):
    baseline = CompressionBaseline()
    baseline.on_validation_end(trainer(7.5, 10), None)
    baseline.on_fit_end(trainer(7.5, 10), None)
    out = capsys.readouterr().out
    assert "not crossed" in out
    assert "xz" not in out


def test_the_sanity_check_and_other_stages_are_no_history():
    baseline = CompressionBaseline()
    sanity, validate = trainer(1.0, 0), trainer(1.0, 0)
    sanity.sanity_checking, validate.state.fn = True, "validate"
    baseline.on_validation_end(sanity, None)
    baseline.on_validation_end(validate, None)
    assert baseline.history == []


def test_the_history_survives_a_checkpoint():
    first, second = CompressionBaseline(), CompressionBaseline()
    first.on_validation_end(trainer(2.5, 10), None)
    second.load_state_dict(first.state_dict())
    assert second.history == first.history


def test_data_without_its_text_is_refused_before_training():
    with pytest.raises(UsageError, match="validation_text"):
        CompressionBaseline().setup(FakeTrainer(datamodule=SimpleNamespace()), None, "fit")
    CompressionBaseline().setup(FakeTrainer(datamodule=None), None, "validate")  # of other data, without a table
    data = FakeTrainer(datamodule=SimpleNamespace(validation_text=lambda: TEXT))
    CompressionBaseline().setup(data, None, "fit")
    with pytest.raises(
        UsageError, match=r"^CompressionBaseline.xz=True needs .* training_text\(\), such as TextData: "
    ):
        CompressionBaseline(xz=True).setup(data, None, "fit")
