"""The ways in: the console script, and `RecipeCLI()` in a user's own script, find modules and print lines alike."""

import errno
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.preloaded import python
from lightning.pytorch import Trainer

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError, one_line_and_exit
from lightning_tricks._trainer.lightning import rank_zero_warn

MODEL = """
import torch
from lightning.pytorch import LightningModule


class Mine(LightningModule):
    def __init__(self, width: int = 2, momentum: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.hparams.momentum)
"""
SCRIPT = (
    "from mine import Mine\nfrom lightning_tricks import RecipeCLI\n\nif __name__ == '__main__':\n    RecipeCLI(Mine)\n"
)
RECIPE = """\
model: Mine
trainer:
  accelerator: cpu
  max_steps: 2
  enable_progress_bar: false
  callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: saved}}]
  logger: false
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, a script and a recipe of the user's own."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run_script(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """`python train.py ARGS`, without a new process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.modules.pop("mine", None)
    return 0


@pytest.mark.long
def test_the_console_script_finds_modules_of_the_working_folder(tmp_path):
    elsewhere = tmp_path / "bin"
    elsewhere.mkdir()
    script = elsewhere / "lightning-tricks"  # as pip writes it
    script.write_text("import sys\nfrom lightning_tricks.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "mine.py").write_text(MODEL)
    done = subprocess.run(
        [python(), str(script), "fit", "--model", "mine.Mine", "--print_config"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "class_path: mine.Mine" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model.width", "two"], "model.width=two: give a whole number"),
        (["--ckpt_path", "none.ckpt"], "ckpt_path=none.ckpt"),
    ],
)
def test_a_mistake_in_a_script_of_ones_own_is_one_line(project, monkeypatch, capsys, args, words):
    assert run_script(monkeypatch, "fit", "--config", "mine.yaml", *args) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {words}")


def test_hints_name_the_program_that_was_started(project, monkeypatch, capsys):
    assert run_script(monkeypatch, "fit", "--config", "mine.yaml") == 0
    said = capsys.readouterr().out
    assert "python train.py validate --config mine.yaml --ckpt_path saved" in said
    assert "python train.py fit --config mine.yaml" in said
    assert "model.init_args.optimizer" not in said  # Mine has no such option
    assert "python -m lightning_tricks" not in said


def test_ctrl_c_ends_the_program_as_it_ends_one_of_a_shell():
    with pytest.raises(SystemExit) as stop, one_line_and_exit():
        raise KeyboardInterrupt
    assert stop.value.code == 130


def test_our_warnings_are_lines_without_a_path_and_others_keep_theirs(capsys, monkeypatch):
    others = []
    monkeypatch.setattr(warnings, "showwarning", lambda *all_of_it: others.append(all_of_it))
    with one_line_and_exit():
        rank_zero_warn("a shard is missing", "and \x1b[31manother")
        warnings.warn("of another library", stacklevel=1)
    rank_zero_warn("as Python shows it")
    assert capsys.readouterr().err == "warning: a shard is missing\nand \\x1b[31manother\n"
    assert [str(message) for message, *_ in others] == ["of another library", "as Python shows it"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name, value in {"TERM": "xterm", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    with one_line_and_exit():
        rank_zero_warn("over the progress line")
    assert capsys.readouterr().err == "\r\x1b[2K\x1b[33mwarning:\x1b[0m over the progress line\n"


def full(text):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("stderr", [None, SimpleNamespace(isatty=lambda: False, write=full, flush=lambda: None)])
def test_a_warning_that_cannot_be_written_ends_no_run(monkeypatch, stderr):
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    monkeypatch.setattr(sys, "stderr", stderr)
    with one_line_and_exit():
        rank_zero_warn("unheard")


@pytest.mark.long
@pytest.mark.parametrize("end", ["", "raise SystemExit(1)", "sys.stdout.flush()"])
def test_where_nobody_reads_the_output_any_more_a_program_ends_without_a_line(end):
    code = f"""\
import sys
from lightning_tricks._core.errors import one_line_and_exit
with one_line_and_exit():
    print(1)
    {end}
"""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([python(), "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_one_line_of_any_command(capsys):
    with pytest.raises(SystemExit) as stop, one_line_and_exit():
        raise OSError(errno.ENOSPC, "No space left on device", "average.ckpt")
    assert stop.value.code == 2
    said = "error: average.ckpt: No space left on device; free some space, or write to another disk\n"
    assert capsys.readouterr().err == said


def test_a_folder_that_has_been_removed_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as stop:
        door.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: the current folder has been removed: go to another one\n"


def test_what_the_user_cannot_mend_keeps_its_traceback(project, monkeypatch):
    (project / "mine.py").write_text(MODEL.replace("self.layer(batch).mean()", "1 / 0"))
    with pytest.raises(ZeroDivisionError):
        run_script(monkeypatch, "fit", "--config", "mine.yaml")


def test_a_trainer_of_ones_own_runs_the_commands_too(project):
    from lightning_tricks import RecipeCLI

    class Own(Trainer):
        pass

    settings = ["--model=mine.Mine", "--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    cli = RecipeCLI(args=["fit", *settings, "--trainer.enable_checkpointing=false"], trainer_class=Own)
    assert type(cli.trainer) is Own
    with pytest.raises(UsageError, match=r"^prepare: the recipe has no data$"):
        RecipeCLI(args=["prepare", *settings], trainer_class=Own)
    del sys.modules["mine"]
