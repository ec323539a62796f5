"""`total_tokens` in a recipe and on the command line: the run, its resume, what is saved and said, wrong inputs."""

import csv
import sys

import numpy as np
import pytest
import yaml
from cli.parsers import one_parser  # noqa: F401, a fixture

from lightning_tricks._core.errors import UsageError
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.cli import next_steps as next_steps_module
from lightning_tricks.data import ShardWriter

RECIPE = """\
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 64, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 8}}
    schedule: {class_path: WarmupCosine, init_args: {warmup_steps: 2}}
data:
  class_path: TokenData
  init_args: {train: train_000000.bin, seq_len: 8, micro_batch_size: 2}
trainer:
  accelerator: cpu
  devices: 1
  logger: {class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: small}}
  callbacks: [{class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2}}]
  log_every_n_steps: 1
"""
STEPS = RECIPE + "  max_steps: 4\n"
TOKENS = "total_tokens: 1.0e+2\n" + RECIPE

pytestmark = pytest.mark.usefixtures("one_parser", "folder")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    monkeypatch.setattr(next_steps_module, "program", lambda: "lightning-tricks")
    for name, text in (
        ("steps", STEPS),
        ("tokens", TOKENS),
        ("neither", RECIPE),
        ("both", TOKENS + "  max_steps: 4\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    with ShardWriter(tmp_path, "train", 64) as writer:
        writer.append(np.arange(1000) % 64)
    return tmp_path


def fit(recipe, *args):
    """The command line of a fit, and the lr of each step in its log."""
    cli = RecipeCLI(args=["fit", "--config", f"{recipe}.yaml", *args])
    with open(f"{cli.trainer.logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        return cli, [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]


def planned(cli, steps):
    return [pytest.approx(cli.model.schedule.lr(3e-4, step, steps)) for step in range(steps)]


def test_one_option_gives_a_recipes_run_in_tokens(capsys, caplog):
    cli, lrs = fit("steps", "--total_tokens", "1e2")
    assert cli.trainer.global_step == 7
    assert lrs == planned(cli, 7)
    out = capsys.readouterr().out
    assert "step 7/7 (100%)" in out
    assert "--total_tokens 200" in next(line for line in out.splitlines() if line.startswith("Go on:"))
    assert "total_tokens=100 replaces the recipe's trainer.max_steps=4" in caplog.text
    with open("runs/small/version_0/config.yaml", encoding="utf-8") as file:
        saved = yaml.safe_load(file)
    assert (saved["total_tokens"], saved["trainer"]["max_steps"], saved["trainer"]["max_epochs"]) == (100, -1, -1)


def test_the_saved_recipe_goes_on_to_more_tokens():
    fit("tokens")
    cli, lrs = fit("runs/small/version_0/config", "--ckpt_path", "last", "--total_tokens=160")
    assert cli.trainer.global_step == 10
    assert lrs == [*planned(cli, 7), *planned(cli, 10)[7:]]
    cli, _ = fit("tokens", "--trainer.max_steps=3")
    assert cli.trainer.global_step == 3


def test_epochs_are_as_good_and_the_line_to_go_on_doubles_them(capsys):
    cli, lrs = fit("neither", "--trainer.max_epochs=1", "--data.micro_batch_size=8")
    assert cli.trainer.global_step == 15  # 124 windows by eight
    assert lrs == planned(cli, 15)
    out = capsys.readouterr().out
    assert "step 15/15 (100%)" in out
    assert next(line for line in out.splitlines() if line.startswith("Go on:")).endswith("--trainer.max_epochs 2")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--config=both.yaml"], r"^total_tokens=100 and trainer\.max_steps=4: give one of them; [^\n]*$"),
        (
            ["--config=neither.yaml", "--total_tokens=50", "--trainer.max_steps=5"],
            r"^total_tokens=50 and trainer\.max_steps=5: give one of them; [^\n]*$",
        ),
        (["--config=neither.yaml"], r"set trainer\.max_steps \(now -1\), trainer\.max_epochs or total_tokens$"),
        (
            ["--config=tokens.yaml", "--total_tokens=-5"],
            r"^TotalTokens\.total_tokens=-5\.0: give a whole number above 0",
        ),
        (["--config=tokens.yaml", "--total_tokens=32"], r"^total_tokens=32 makes 2 steps: .*warmup_steps=2 "),
        (["--config=tokens.yaml", "--max_tokens=5"], r"did you mean total_tokens\?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_length_is_one_line_before_the_data(args, line, folder):
    (folder / "train_000000.bin").unlink()
    with pytest.raises(UsageError, match=line) as caught:
        RecipeCLI(args=["fit", *args])
    assert "\n" not in str(caught.value)


def test_another_command_reads_past_it_in_a_recipe_and_refuses_it_when_typed():
    with pytest.raises(UsageError, match=r"^--total_tokens is an option of fit$"):
        RecipeCLI(args=["validate", "--config", "tokens.yaml", "--total_tokens", "5"])
    elsewhere = ["--trainer.devices=8", "--trainer.accelerator=cuda"]  # no device of this machine is asked for
    RecipeCLI(args=["prepare", "--config", "tokens.yaml", *elsewhere])
