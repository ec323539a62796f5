"""Each run has a folder with its checkpoints; `last` is found there and named; a refused start leaves nothing."""

import os
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import trainer_with
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import AtomicCheckpointIO
from lightning_tricks.checkpoints.write_file import save_with_record
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.cli import next_steps as next_steps_module
from lightning_tricks.cli.choose_checkpoint import choose_checkpoint
from lightning_tricks.cli.next_steps import next_steps
from lightning_tricks.cli.run_folder import RunFolder
from lightning_tricks.loggers import ResumingCSVLogger, ResumingTensorBoardLogger
from lightning_tricks.mixins import OptimizerMixin

RUN_OF_TOY = "runs/toy/version_0"
LAST = f"{RUN_OF_TOY}/checkpoints/last.ckpt"


class Toy(OptimizerMixin, pl.LightningModule):
    """A linear layer that refuses to train where it is told to."""

    def __init__(self, refuses: str = "", **kwargs):
        super().__init__(**kwargs)
        self.refuses = refuses
        self.layer = torch.nn.Linear(2, 1)

    def prepare_data(self):
        self._may_refuse("prepare_data")

    def _may_refuse(self, place):
        if self.refuses == place:
            raise UsageError(f"refused in {place}")

    def setup(self, stage):
        self._may_refuse("setup")

    def configure_model(self):
        self._may_refuse("configure_model")

    def on_train_start(self):
        self._may_refuse("on_train_start")

    def training_step(self, batch, batch_idx):
        self._may_refuse(f"step {self.trainer.global_step}")
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self._may_refuse("sanity" if self.trainer.sanity_checking else "validation")
        self.log("val/loss", self.layer(batch).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


LOGGERS = {
    "tensorboard": lambda: [ResumingTensorBoardLogger("runs", "toy")],
    "csv": lambda: [ResumingCSVLogger("runs", "toy")],
    "lightning's": lambda: [CSVLogger("runs", "toy")],
    "both": lambda: [ResumingTensorBoardLogger("runs", "toy"), ResumingCSVLogger("csv", "toy")],
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="lightning.pytorch")
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    monkeypatch.setattr(next_steps_module, "program", lambda: "python -m lightning_tricks")


def run(command, checkpoint=None, *, steps=4, logger="tensorboard", saves=True, dirpath=None, refuses=""):
    """What the command line does for a recipe, without parsing one."""
    saver = [ModelCheckpoint(dirpath, every_n_train_steps=2, save_last="link")] if saves else []
    trainer = trainer_with(*saver, max_steps=steps, logger=LOGGERS[logger]())
    with warnings.catch_warnings():
        folder = RunFolder()
        trainer.callbacks.insert(0, folder)
        checkpoint = choose_checkpoint(command, checkpoint, trainer)
        folder.choose(command, checkpoint, trainer)
        getattr(trainer, command)(Toy(refuses), ckpt_path=checkpoint)
    return trainer


def test_an_evaluation_takes_weights_alone_and_a_fit_does_not(tmp_path):
    path = str(tmp_path / "weights.ckpt")
    torch.save({"state_dict": {}, "loops": {}}, path)
    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=AtomicCheckpointIO())
    assert [choose_checkpoint(command, path, trainer) for command in ("validate", "test", "predict")] == [path] * 3
    with pytest.raises(UsageError, match="it holds weights only"):
        choose_checkpoint("fit", path, trainer)


SAVER = "[{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2, save_last: link}}]"


def command_line(command, *options, saver=SAVER):
    """The command line itself, in this process."""
    return RecipeCLI(
        args=[
            command, f"--model={__name__}.Toy", "--trainer.accelerator=cpu", "--trainer.max_steps=4",
            "--trainer.logger={class_path: ResumingTensorBoardLogger, init_args: {save_dir: runs, name: toy}}",
            f"--trainer.callbacks={saver}", "--trainer.enable_progress_bar=false", *options,
        ]
    )  # fmt: skip


def folders(root: Path = Path("runs/toy")) -> list[str]:
    return sorted(path.name for path in root.glob("*"))


def step_of(checkpoint) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


@pytest.mark.parametrize("logger", ["tensorboard", "lightning's"])
def test_each_run_keeps_its_checkpoints_in_a_folder_of_its_own(logger):
    run("fit", logger=logger)
    run("fit", logger=logger, steps=6)
    assert folders() == ["version_0", "version_1"]
    for number, steps in ((0, 4), (1, 6)):
        last = Path(f"runs/toy/version_{number}/checkpoints/last.ckpt")
        assert last.is_symlink()
        assert step_of(last) == steps


def test_last_is_the_newest_run_with_a_checkpoint_and_is_named(caplog):
    run("fit")
    run("fit")
    run("fit", saves=False)  # a newer folder, with no checkpoint in it
    run("fit", "last", steps=8)
    said = [record.getMessage() for record in caplog.records]
    last = "runs/toy/version_1/checkpoints/last.ckpt"
    assert f"ckpt_path=last: {last}, the newest checkpoint in runs/toy" in said
    assert f"Going on from step 4 of {last}" in said
    assert folders() == ["version_0", "version_1", "version_2"]
    assert step_of(last) == 8
    assert step_of("runs/toy/version_0/checkpoints/last.ckpt") == 4


def test_a_resume_by_path_goes_on_in_the_folder_of_its_checkpoint():
    run("fit", logger="both")
    run("fit", logger="both")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Checkpoint directory|The dirpath has changed")
        run("fit", "runs/toy/version_0/checkpoints/last.ckpt", logger="both", steps=8)
    assert folders() == folders(Path("csv/toy")) == ["version_0", "version_1"]
    assert step_of("runs/toy/version_0/checkpoints/last.ckpt") == 8


@pytest.mark.parametrize(
    ("logger", "save_dir"), [("ResumingCSVLogger", "~/runs"), ("ResumingTensorBoardLogger", "$HOME/runs")]
)
def test_a_save_dir_with_a_home_folder_or_a_variable_holds_logs_and_checkpoints(logger, save_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    place = f"--trainer.logger={{class_path: {logger}, init_args: {{save_dir: {save_dir}, name: toy}}}}"
    command_line("fit", place, "--resume=auto")
    command_line("fit", place, "--resume=auto", "--trainer.max_steps=6")
    assert [path.name for path in Path().iterdir()] == ["home"]
    assert folders(Path("home/runs/toy")) == ["version_0"]
    assert step_of("home/runs/toy/version_0/checkpoints/last.ckpt") == 6


def test_with_a_dirpath_checkpoints_lie_there_and_a_resume_goes_on_in_the_newest_folder():
    run("fit", dirpath="kept")
    run("fit", "last", dirpath="kept", steps=8)
    assert folders() == ["version_0"]
    assert step_of("kept/last.ckpt") == 8
    os.rename("kept", "moved")
    evaluation = run("validate", "moved/last.ckpt", dirpath="kept")
    assert evaluation.checkpoint_callback.dirpath == os.path.abspath("kept"), "it is the user's own"


def test_two_starts_at_once_get_two_folders(monkeypatch):
    run("fit")
    monkeypatch.setattr(ResumingTensorBoardLogger, "_get_next_version", lambda self: 0)  # so it was a moment ago
    run("fit")
    assert folders() == ["version_0", "version_1"]


@pytest.mark.parametrize(
    ("command", "checkpoint", "message"),
    [
        ("validate", None, "^validate needs a checkpoint: give --ckpt_path FILE, --ckpt_path last .* none for"),
        ("test", None, "^test needs a checkpoint"),
        ("predict", None, "^predict needs a checkpoint"),
        ("validate", "last", "^ckpt_path=last: there is no checkpoint in runs/toy: give the path"),
        ("validate", "best", "^ckpt_path=best: only the program that has trained knows it: give the file"),
        ("fit", "last", "^ckpt_path=last: there is no checkpoint in runs/toy: start a new run at step 0 with"),
    ],
)
def test_what_is_refused_for_its_checkpoint_leaves_no_folder(command, checkpoint, message):
    with pytest.raises(UsageError, match=message):
        run(command, checkpoint, logger="both")
    assert not list(Path().iterdir())


def test_a_fit_that_is_refused_later_leaves_its_folder_and_the_recipe_and_checkpoints_of_the_run_it_was_to_go_on_with():
    command_line("fit", "--model.optimizer=SGD")
    files = [path for path in Path("runs/toy/version_0").rglob("*") if path.is_file() and "tfevents" not in path.name]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(UsageError, match="holds the state of SGD, which AdamW cannot take up"):
        command_line("fit", "--model.optimizer=AdamW", "--ckpt_path=last")
    assert {path: path.read_bytes() for path in files} == before
    with pytest.raises(UsageError, match="refused in setup"):
        command_line("fit", "--model.refuses=setup")
    assert folders() == ["version_0", "version_1"]
    assert not list(Path("runs/toy/version_1").rglob("*.yaml"))
    command_line("fit", "--model.optimizer=SGD", "--ckpt_path=last", "--trainer.max_steps=6")  # the newest that has one
    assert step_of("runs/toy/version_0/checkpoints/last.ckpt") == 6


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("runs", r"^runs/toy/validate: .*: give the logger another save_dir$"),
        ("runs/toy/validate", r"^runs/toy/validate: .* \(File exists\): give the logger another save_dir$"),
    ],
)
def test_a_file_in_the_way_of_the_run_folder_is_one_line(file, said):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("")
    with pytest.raises(UsageError, match=said):
        run("validate", "none")
    assert Path(file).is_file()


def test_an_evaluation_takes_last_and_its_folder_is_no_run():
    run("fit")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Checkpoint directory|The dirpath has changed")
        for command in ("validate", "test", "predict"):
            run(command, "last")
    run("fit")
    assert folders() == ["predict", "test", "validate", "version_0", "version_1"]


def test_predictions_are_in_the_file_and_not_in_memory_unless_asked_for():
    for options, kept in (([], False), (["--return_predictions=true"], True)):
        done = command_line("predict", "--ckpt_path=none", *options)
        assert done.trainer.predict_loop.return_predictions is kept
        assert len(Path("predictions.jsonl").read_text().splitlines()) == 8
        Path("predictions.jsonl").unlink()


def commands(out: str) -> dict[str, list[str]]:
    """The lines after a fit, by their first word, without the program's name."""
    found = re.findall(r"^(Evaluate|Go on): +python -m lightning_tricks (.*)$", out, re.MULTILINE)
    return {word: line.split() for word, line in found}


def test_the_lines_after_a_fit_can_be_typed_as_they_are(capfd):
    command_line("fit", "--model.optimizer={class_path: SGD, init_args: {lr: 0.25}}")
    said = capfd.readouterr()
    lines = commands(said.out)
    assert lines["Evaluate"] == [
        "validate", "--config", "runs/toy/version_0/config.yaml",
        "--ckpt_path", "runs/toy/version_0/checkpoints/last.ckpt",
    ]  # fmt: skip
    assert (
        "\nTensorBoard: tensorboard --logdir runs/toy   then open http://localhost:6006/#scalars&_smoothingWeight=0\n"
        in said.out
    )
    run("fit")  # a newer run changes nothing
    capfd.readouterr()  # of a Trainer by itself
    RecipeCLI(args=lines["Evaluate"])
    cli = RecipeCLI(args=lines["Go on"])
    assert cli.trainer.global_step == 8
    assert Path(cli.trainer.log_dir).name == "version_0"
    resumed = capfd.readouterr()
    for noise in ("litlogger", "litmodels", "FLOPs", "Modules in", "Restored all states"):
        assert noise not in "".join(said + resumed)


def test_where_only_a_recipe_was_given_the_lines_name_the_recipe_and_where_nothing_was_saved_they_say_so():
    trainer, start = run("fit"), ["--init_from", "base.ckpt", "--resume=auto"]
    lines = next_steps(trainer, ["--config", "toy.yaml", "--config=more.yaml", "--trainer.max_steps", "4", *start])
    recipe = "--config toy.yaml --config=more.yaml"
    assert f"Evaluate:    python -m lightning_tricks validate {recipe} --ckpt_path {LAST}" in lines
    assert f"Go on:       python -m lightning_tricks fit {recipe} --ckpt_path {LAST} --trainer.max_steps 8" in lines
    lines = next_steps(run("fit", saves=False), [])
    assert lines[1:] == ["No checkpoint was saved: there is nothing to evaluate or to go on from"]


def test_a_run_that_saved_less_than_it_trained_says_which_checkpoint_is_meant():
    def lines(last_model_path=""):
        saver = SimpleNamespace(dirpath="kept", last_model_path=last_model_path, best_model_path="")
        none = dict.fromkeys(("lightning_module", "logger", "ckpt_path"))
        run = {"global_step": 5, "max_steps": 5, "callbacks": [], "loggers": [], "checkpoint_callbacks": [saver]}
        return next_steps(SimpleNamespace(**none, **run, default_root_dir="."), [])

    Path("kept").mkdir()
    content = {"global_step": 4, "state_dict": {}}
    save_with_record(content, Path("kept/step=4.ckpt"))
    assert lines("kept/step=4.ckpt")[:3] == [
        "No checkpoint was saved after step 4, and the run ended at step 5: the lines below take kept/step=4.ckpt",
        "Evaluate:    python -m lightning_tricks validate --ckpt_path kept/step=4.ckpt",
        "Go on:       python -m lightning_tricks fit --ckpt_path kept/step=4.ckpt --trainer.max_steps 10",
    ]
