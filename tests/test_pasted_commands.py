"""A newcomer's tasks, by the commands of the pages as they stand there: each must work at the first attempt.

The test adds what makes them short: a small text, few steps, and the places of the checkpoints of short runs.
"""

import argparse
import inspect
import logging
import re
import shlex
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
from cli.parsers import no_hyper_parameters, one_parser  # noqa: F401, fixtures

from lightning_tricks import __main__ as door

ROOT = Path(__file__).resolve().parent.parent
SHORT = [
    "--trainer.max_steps=10", "--model.schedule.warmup_steps=1", "--trainer.val_check_interval=10", "--data.seq_len=64",
    "--data.cache_dir=cache", "--trainer.enable_progress_bar=false",
]  # fmt: skip
SMALL_DATA = ["--data.files=text.txt", "--data.vocab_size=300"]

pytestmark = [
    pytest.mark.pages,
    pytest.mark.usefixtures("one_parser", "no_hyper_parameters"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the recipes, whose saver writes every second step, and some text."""
    folder = tmp_path_factory.mktemp("pasted")
    (folder / "recipes").mkdir()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        text = recipe.read_text().replace("every_n_train_steps: 200", "every_n_train_steps: 2, keep_last: 9")
        (folder / "recipes" / recipe.name).write_text(text)
    text = inspect.getsource(argparse)[:60_000]
    (folder / "text.txt").write_text(text)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.md").write_text(text[:30_000])
    return folder


def command_of(page: str, *words: str) -> list[str]:
    """The one command in the page's blocks that holds all these words."""
    blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = {line.strip() for line in lines if all(word in line for word in (*words, "lightning_tricks"))}
    (line,) = found
    return shlex.split(line.removeprefix("$ "), comments=True)[3:]


@pytest.fixture
def pasted(folder, monkeypatch, capsys):
    """Carry out a command, and give what it says, all of it."""
    log = pl.utilities.rank_zero.rank_zero_module.log
    monkeypatch.chdir(folder)

    def run(*args: str) -> str:
        capsys.readouterr()
        lines: list[str] = []
        handler = logging.Handler()
        monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
        monkeypatch.setattr(sys, "argv", ["lightning-tricks", *args])
        log.addHandler(handler)
        try:
            door.run(list(args))
        finally:
            log.removeHandler(handler)
        return "\n".join([*lines, *capsys.readouterr()])

    return run


def test_a_schedule_a_learning_rate_a_batch_and_fp32(pasted):
    command = command_of("command_line.md", "--model.schedule WSD", "--trainer.plugins null")
    said = pasted(*command, *SHORT, *SMALL_DATA, "--trainer.logger.name=wsd")
    assert "WarmupStableDecay instead of WarmupLinear" in said
    assert re.search(r"decay +24 +3,145,728 +0\.001 ", said)
    assert "CPU, fp32" in said


def test_a_branch_off_a_finished_run_then_a_text_and_a_fine_tuning(pasted, folder):
    trunk = command_of("branch.md", "fit", "--model.schedule WSD")
    pasted(*trunk, *SHORT, *SMALL_DATA)
    assert (folder / "runs/tiny/version_0/checkpoints/step=10.ckpt").exists()
    branch = command_of("branch.md", "branch", "step=200.ckpt")
    options = [option for option in SHORT if "max_steps" not in option]
    short = [word.replace("step=200", "step=4") for word in branch[:-1]]
    assert "from step 4 to 6" in pasted(*short, "2", *options, *SMALL_DATA)
    said = pasted(*command_of("generating_text.md", "--ckpt_path last"), "--max_new_tokens=4")
    assert "ckpt_path=last: runs/tiny/version_1/checkpoints/last.ckpt" in said
    assert "def " in said
    again = command_of("checkpoints.md", "--data.tokenizer")
    said = pasted(*again, *SHORT, "--trainer.max_steps=2", "--data.vocab_size=300")
    assert "weights loaded; left out: the optimizer's state" in said


def test_a_recipe_for_eight_gpus_on_a_laptop_is_one_line(folder, monkeypatch, capsys):
    from lightning.pytorch import accelerators

    for accelerator in (accelerators.CUDAAccelerator, accelerators.MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
    page = (ROOT / "docs/quickstart.md").read_text()
    (shown,) = re.findall(r"^error: trainer.+$", page, re.M)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["lightning-tricks", *command_of("quickstart.md", "llama7b.yaml")])
    with pytest.raises(SystemExit):
        door.main()
    assert capsys.readouterr().err.splitlines()[-1] == shown
