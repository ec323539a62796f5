"""The commands: a row of `GROUPS` for each, of which help, suggestions, docs and completion are made. Imports none.

A command is a module or folder here, and has a function `run`, which is given by `Command.needs`:

- "nothing": `run(args)`, the words after the name.
- "a recipe": `run(model, datamodule, trainer, *, ...)`, the objects of a recipe, and the Trainer's arguments as a
  mapping: the recipe's devices need not exist here. Its other parameters are options of the command: their types and
  defaults from the signature, their help from the docstring.
- "a Trainer": the same with a Trainer of one process on this machine; the option `ckpt_path`, if it has one, is a
  checkpoint that can be opened.
- "the parser": it stands in `cli`, which has the parser of recipes.
- "a fit": `run(args)` returns the arguments of the `fit` that the command is, and a `FitChange` for it.
- "settings": `run(args)` returns the words of a recipe, and a function of `load_recipe`'s results and the settings.
"""

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.suggest import did_you_mean

Needs = Literal["nothing", "a recipe", "a Trainer", "a fit", "settings", "the parser"]


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: as it is typed.
        help: for the list of commands, where it stands in one line of 80 columns.
        needs: what `run` is given; see above.
        words: names of other programs for it, which lead to it.
        module: its name in this package; empty for a command of Lightning's.
        recipes: of a command on a recipe, options that name the file of one more recipe; `run` gets a `Recipe`.
    """

    name: str
    help: str
    needs: Needs
    words: tuple[str, ...] = ()
    module: str = ""
    recipes: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(f"{__name__}.{self.module}")


class Recipe(NamedTuple):
    """The objects of one more recipe, of its file alone: what is typed behind the command changes the first recipe."""

    file: str
    model: Any
    datamodule: Any
    trainer: Mapping[str, Any]


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are UsageErrors. Its program is named `python -m lightning_tricks COMMAND`.

    No option may be shortened: words that `fit` gets would be taken for one.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog if " " in prog else f"python -m lightning_tricks {prog}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as one line that names the command."""
        command = self.prog.split()[3]
        raise UsageError(f"{command}: {message}; {command} --help lists the options")


class FitChange(Protocol):
    """What makes a `fit` another command. The run gets a folder of its own. `json`: file for its figures, or None."""

    json: str | None

    def change(self, config: Any) -> None:
        """Change the parsed recipe, before its objects are built."""

    def check(self, trainer: Any) -> None:
        """Refuse the run, before it starts; the folders of its loggers are chosen."""

    def options(self) -> list[str]:
        """The options by which `fit` itself would do the same."""


# By use, in the order of `--help`.
GROUPS: Mapping[str, tuple[Command, ...]] = {
    "train": (
        Command("fit", "train; --resume auto resumes from the newest checkpoint", "a Trainer",
                ("train", "pretrain", "run")),
        Command("branch", "start a decay from a checkpoint of the stable part of a run", "a fit", (), "branch")),
    "before a run": (
        Command("ls", "list the recipes that come with the collection", "nothing", ("list",), "ls"),
        Command("cp", "copy a recipe, to change it: cp NAME [FOLDER or FILE]", "nothing", ("copy",), "cp"),
        Command("check", "model, data, layout, memory, devices, disk: will it start?", "a recipe",
                ("preflight", "pre-flight"), "check"),
        Command("plan", "does it fit, how long, what does it cost? --gpu h100", "a recipe",
                ("estimate", "memory", "dry-run"), "plan"),
        Command("schedule", "learning rate of a recipe, drawn", "a recipe", ("plot", "lr"), "schedule", ("against",)),
        Command("ladder", "small rungs of a recipe, and a forecast of its final loss", "settings",
                ("scaling", "scaling-law", "forecast"), "ladder"),
        Command("coordinate-check", "with muP: do activations keep their size?", "a recipe", (), "coordinate_check"),
        Command("verify-resume", "is a run with kill -9 and a resume bitwise a straight one?", "nothing",
                ("verify", "check-resume"), "verify_resume")),
    "data": (
        Command("show-data", "training rows as the model gets them, with their sources", "a recipe",
                ("look", "inspect", "preview", "head"), "show_data"),
        Command("prepare", "turn the recipe's text into token shards, and stop", "a recipe", ("tokenize",), "prepare")),
    "after a run, by its logs": (
        Command("doctor", "what is wrong: symptoms with evidence, cause and remedy", "nothing",
                ("diagnose", "diagnosis", "symptoms", "debug"), "doctor"),
        Command("compare", "runs side by side: settings, curves, and the noise of seeds", "nothing",
                ("diff", "versus", "significance"), "compare"),
        Command("runs", "a table of the runs in a folder, with differing settings", "nothing",
                ("history", "experiments", "results"), "runs"),
        Command("ledger", "where two runs with RunLedger first differ: ledger diff A B", "nothing", (), "ledger")),
    "look at a checkpoint": (
        Command("validate", "validation figures: --ckpt_path FILE, last or none", "a Trainer", ("evaluate", "val")),
        Command("test", "the same on the test set", "a Trainer"),
        Command("predict", "log-probability of each token of the test set, to a file", "a Trainer", ("infer",)),
        Command("generate", 'continue a text: --ckpt_path FILE --prompt "..."', "nothing", (), "generate"),
        Command("eval", "scores on tasks of lm_eval: --ckpt_path FILE --tasks LIST", "nothing",
                ("lm-eval", "benchmark"), "eval"),
        Command("autopsy", "the documents of one optimizer step, by their loss", "a Trainer", (), "autopsy")),
    "change or move a checkpoint": (
        Command("average", "average weights: average CKPT CKPT ... --output FILE", "nothing",
                ("soup", "merge", "mean", "ensemble"), "average"),
        Command("consolidate", "make one file of a sharded one: consolidate FOLDER FILE", "nothing", (), "consolidate"),
        Command("export", "to Hugging Face or GGUF, compared: --ckpt_path FILE --output", "nothing",
                ("to-hf", "convert", "huggingface", "save-pretrained", "gguf", "llama.cpp", "ollama"), "export"),
        Command("import", "a recipe that continues a Hugging Face folder: import FOLDER", "nothing",
                ("from-hf", "continue-pretraining"), "import_folder")),
    "shell and editor": (
        Command("completion", "for bash and zsh: eval \"$(lightning-tricks completion)\"", "nothing", (), "completion"),
        Command("config-schema", "a JSON schema by which an editor checks recipes: --json FILE", "the parser",
                ("schema", "json-schema"))),
}  # fmt: skip

COMMANDS: Mapping[str, Command] = {command.name: command for group in GROUPS.values() for command in group}


def find(word: str) -> Command:
    """The command of a word of the command line, in which `_` may stand for `-`.

    Raises:
        UsageError: there is none.
    """
    name = word.replace("_", "-")
    if name in COMMANDS:
        return COMMANDS[name]
    meant = next((command.name for command in COMMANDS.values() if name in command.words), None)
    near = f"; did you mean {meant}?" if meant else did_you_mean(word, COMMANDS)
    raise UsageError(f"unknown command {word!r}{near}: --help lists them")


def recipes_folder() -> Path:
    """The folder of the recipes: inside an installed package, or beside the package in a clone."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"
