"""The package: public names, cheap import, and which of the two Lightnings it builds on."""

import subprocess
import sys

import pytest

import lightning_tricks


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


def test_importing_the_package_imports_no_torch():
    assert python("import sys, lightning_tricks; print('torch' in sys.modules)").stdout.strip() == "False"


@pytest.mark.parametrize("name", [n for n in lightning_tricks.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(lightning_tricks, name)
    assert thing.__name__ == name
    assert len(thing.__doc__.strip().splitlines()[0]) > 20


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_trick"):
        _ = lightning_tricks.no_such_trick


BASES = """
import {first}
from lightning_tricks.callbacks import TrainingProgressBar
print(TrainingProgressBar.__mro__[1].__module__.split('.')[0])
"""


@pytest.mark.parametrize(
    ("first", "package"),
    [("sys", "lightning"), ("lightning", "lightning"), ("pytorch_lightning", "pytorch_lightning")],
)
def test_builds_on_the_lightning_that_the_program_imported(first, package):
    done = python(BASES.format(first=first))
    assert done.stdout.strip() == package, done.stderr


def test_the_choice_can_be_forced_and_a_wrong_one_is_refused():
    done = python(BASES.format(first="lightning"), LIGHTNING_TRICKS_BACKEND="pytorch_lightning")
    assert done.stdout.strip() == "pytorch_lightning", done.stderr
    wrong = python(BASES.format(first="sys"), LIGHTNING_TRICKS_BACKEND="keras")
    assert "LIGHTNING_TRICKS_BACKEND='keras': give one of lightning, pytorch_lightning" in wrong.stderr


def test_our_mixins_and_precision_run_under_a_pytorch_lightning_trainer():
    code = """
import pytorch_lightning as pl, torch
from lightning_tricks import AutoPrecision, LanguageModel, Llama
from torch.utils.data import DataLoader
model = LanguageModel(Llama(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=8))
ids = torch.randint(0, 32, (4, 8))
data = DataLoader([{"input_ids": ids, "labels": ids}] * 3, batch_size=None)
trainer = pl.Trainer(accelerator="cpu", max_steps=3, plugins=AutoPrecision(), logger=False, enable_checkpointing=False)
trainer.fit(model, data)
assert trainer.global_step == 3
"""
    done = python(code)
    assert done.returncode == 0, done.stderr[-2000:]
