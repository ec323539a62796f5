"""coordinate-check: activations are flat over the width with muP, and grow without it."""

import json
import math
from pathlib import Path

import pytest
import schedulefree
import torch
from cli.parsers import one_parser  # noqa: F401, a fixture
from cli.wrong_inputs import SMALL
from torch import nn
from torch.nn import functional as F

from lightning_tricks import LanguageModel, Llama, MuonAdamW, MuP
from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.commands.coordinate_check import CoordinateReport, CoordinateTrial, Sizes, coordinate_check
from lightning_tricks.optim import build_optimizer
from lightning_tricks.optim.mup import at_width

CONFIG = Llama(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=32, activation="relu2")
WIDTHS = (64, 128, 256)
BATCHES = [torch.randint(61, (2, 33), generator=torch.Generator().manual_seed(step)) for step in range(4)]


def check(mup, optimizer, of_optimizer=True):
    def build(width, seed):
        torch.manual_seed(seed)
        model = LanguageModel(at_width(CONFIG, width, 8), mup=mup)
        model.configure_model()

        def loss(tokens):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return CoordinateTrial(model, build_optimizer(model, optimizer, mup=mup if of_optimizer else None), loss)

    return coordinate_check(build, BATCHES, WIDTHS)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.005),
    "muon": lambda groups: MuonAdamW(groups, lr=0.005),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_activations_are_flat_with_mup_and_grow_without_it(name):
    flat, growing = check(MuP(64), OPTIMIZERS[name]), check(None, OPTIMIZERS[name])
    assert flat.failed == []
    assert {"decoder.head", "decoder.blocks.1.mlp"} <= set(growing.failed)


def test_without_the_scale_of_the_learning_rate_alone_the_check_fails():
    assert check(MuP(64), OPTIMIZERS["adamw"], of_optimizer=False).failed


def test_a_schedule_free_optimizer_steps_in_its_train_mode():
    report = check(None, lambda groups: schedulefree.AdamWScheduleFree(groups, lr=0.005))
    assert all(sizes.change > 0 for layer in report.layers.values() for sizes in layer)


# ---- the report


def report(*sizes, tolerance=0.3):
    layer = tuple(Sizes(1.0, size, 1.0) for size in sizes)
    return CoordinateReport((64, 128, 256)[: len(sizes)], 10, tolerance, {"net": layer})


def test_a_slope_is_the_exponent_of_the_width():
    assert report(1.0, 2.0, 4.0).slope("net") == pytest.approx(1.0)
    assert report(3.0, 3.0 / 2**0.5, 1.5).slope("net") == pytest.approx(-0.5)
    assert report(0.0, 0.0, 0.0).slope("net") == 0.0
    assert report(1.0, 0.0, 1.0).slope("net") == report(1.0, math.nan, 1.0).slope("net") == math.inf


def test_the_table_ends_with_a_verdict():
    text = str(report(1.0, 2.0, 4.0))
    assert "net             1           2           4       +1.00       +0.00  not flat" in text
    assert text.endswith("1 of 1 layers are not flat: slopes may be -0.3 to 0.3")
    assert str(report(1.0, 1.1, 1.0)).endswith("\nflat: slopes may be -0.3 to 0.3")


def test_wrong_input():
    def build(width, seed):
        raise AssertionError

    with pytest.raises(UsageError, match="widths=64: give two or more different widths"):
        coordinate_check(build, [1], [64, 64])
    with pytest.raises(UsageError, match="steps=0, seeds=1: give at least one of each"):
        coordinate_check(build, [])
    with pytest.raises(UsageError, match="tolerance=nan: give a number above 0"):
        coordinate_check(build, [1], tolerance=math.nan)
    empty = nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 1))
    trial = CoordinateTrial(empty, torch.optim.SGD(empty.parameters()), lambda batch: batch)
    with pytest.raises(UsageError, match="Sequential has no embedding, head or repeated blocks"):
        coordinate_check(lambda width, seed: trial, [1])


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("coordinates")
    (folder / "small.yaml").write_text(SMALL)
    (folder / "text.txt").write_bytes(Path(text_file).read_bytes())
    return folder


def run(*args):
    sizes = ["--widths=32,64,128", "--steps=3", "--model.decoder.n_heads=4", "--model.optimizer.lr=2e-2"]
    with pytest.raises(SystemExit) as ended:
        door.run(["coordinate_check", "--config", "small.yaml", *sizes, "--model.mup", "{base_width: 32}", *args])
    return ended.value.code


def test_the_command_ends_with_0_where_it_is_flat_and_with_1_elsewhere(folder, monkeypatch, capsys, one_parser):  # noqa: F811
    monkeypatch.chdir(folder)
    assert run("--json", "figures.json") == 0
    printed = capsys.readouterr().out
    assert "mean |output| after 3 steps" in printed
    assert "\nflat: slopes may be -0.3 to 0.3\n" in printed
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["widths"] == [32, 64, 128]
    assert len(figures["layers"]["decoder.head"]) == 3
    assert run("--model.mup", "null") == 1
    assert "are not flat" in capsys.readouterr().out


WIDER = "{base_width: 48, base_head_dim: 16}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--widths", "32,60"], "widths: 60 does not fit the recipe's heads: give multiples of 16"),
        (
            ["--widths", "48,64", "--model.decoder.n_heads=3", "--model.decoder.d_model=96", "--model.mup", WIDER],
            "widths: 64 does not fit the recipe's heads: give multiples of 3",
        ),
        (["--widths", "a"], "widths=a: give whole numbers with commas"),
        (["--steps", "0"], "steps=0: give at least 1"),
        (["--data", "null"], "data=none: give the recipe TextData or TokenData"),
        (["--model", "lightning.pytorch.demos.boring_classes.BoringModel"], "model=BoringModel is no LanguageModel"),
    ],
)
def test_a_mistake_is_one_line(args, words, folder, monkeypatch, one_parser):  # noqa: F811
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=words):
        door.run(["coordinate-check", "--config", "small.yaml", *args])
