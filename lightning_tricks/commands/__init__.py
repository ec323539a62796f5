"""The commands: a row of `_TABLE` for each, of which help, suggestions, docs and completion are made. Imports none.

A command is a module or folder here, and has a function `run`, which is given by `Command.needs`:

- "nothing": `run(args)`, the words after the name.
- "a recipe": `run(model, datamodule, trainer, *, ...)`, the objects of a recipe, and the Trainer's arguments as a
  mapping: the recipe's devices need not exist here. Its other parameters are options of the command: their types and
  defaults from the signature, their help from the docstring.
- "a Trainer": the same with a Trainer of one process on this machine; the option `ckpt_path`, if it has one, is a
  checkpoint that can be opened.
- "the parser": it stands in `cli`, which has the parser of recipes.
- "a fit": `run(args)` returns the arguments of the `fit` that the command is, and a `FitChange` for it.
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

Needs = Literal["nothing", "a recipe", "a Trainer", "a fit", "the parser"]


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        name: as it is typed.
        help: for the list of commands.
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
    """argparse's parser, whose errors are UsageErrors. Its program is named `lightning-tricks COMMAND`.

    No option may be shortened: words that `fit` gets would be taken for one.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as one line that names the command."""
        command = self.prog.split()[1]
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


_TABLE = (
    Command("fit", "train; --resume auto resumes from the newest complete checkpoint, or starts; --ckpt_path FILE or "
            "last; --init_from FILE starts a run from its weights alone (fine-tuning)",
            "a Trainer", ("train", "pretrain", "run")),
    Command("validate", "validation figures of a checkpoint (--ckpt_path FILE, last or none)",
            "a Trainer", ("evaluate", "val")),
    Command("test", "the same on the test set", "a Trainer"),
    Command("predict", "log-probability of each token of the test set, to a file (--output FILE.jsonl)",
            "a Trainer", ("infer",)),
    Command("autopsy", "the documents of one optimizer step by their loss: --ckpt_path FILE --step N",
            "a Trainer", (), "autopsy"),
    Command("average", "average the weights of checkpoints: average CKPT CKPT ... --output FILE [--weights 1,2,1]",
            "nothing", ("soup", "merge", "mean", "ensemble"), "average"),
    Command("branch", "start a decay from a checkpoint of the stable part of a run: --ckpt_path FILE --decay_steps N",
            "a fit", (), "branch"),
    Command("check", "a list of checks before the launch: model, data, layout, memory, devices, disk. Exits with 1 "
            "if one fails", "a recipe", ("preflight", "pre-flight"), "check"),
    Command("compare", "runs side by side: settings that differ, curves over steps, tokens, FLOPs and hours, and "
            "what the seeds can show; exits with 1 if one is worse than the first",
            "nothing", ("diff", "versus", "significance"), "compare"),
    Command("completion", 'print the completion for a shell: eval "$(lightning-tricks completion)" in ~/.bashrc or '
            "~/.zshrc", "nothing", (), "completion"),
    Command("config-schema", "a JSON schema of recipes, with which an editor completes and checks them: --json FILE",
            "the parser", ("schema", "json-schema")),
    Command("consolidate", "make one checkpoint file of a sharded one: consolidate FOLDER FILE",
            "nothing", (), "consolidate"),
    Command("coordinate-check", "do activations keep their size at widths 64 to 1024? Flat with muP",
            "a recipe", (), "coordinate_check"),
    Command("cp", "copy a recipe, to change it: cp NAME [FOLDER or FILE]", "nothing", ("copy",), "cp"),
    Command("doctor", "what is wrong with a run, by its logs: symptoms with evidence, cause and remedy; exits with 1 "
            "if there are any", "nothing", ("diagnose", "diagnosis", "symptoms", "debug"), "doctor"),
    Command("eval", "scores on tasks of lm_eval: --ckpt_path FILE --tasks arc_easy,lambada_openai",
            "nothing", ("lm-eval", "benchmark"), "eval"),
    Command("export", "a Hugging Face folder or a GGUF file of a checkpoint, compared: --ckpt_path FILE --output "
            "FOLDER [--format gguf]",
            "nothing", ("to-hf", "convert", "huggingface", "save-pretrained", "gguf", "llama.cpp", "ollama"), "export"),
    Command("generate", 'continue a text: --ckpt_path FILE --prompt "..."', "nothing", (), "generate"),
    Command("import", "a recipe to continue training a Hugging Face folder: import FOLDER --output mine.yaml",
            "nothing", ("from-hf", "continue-pretraining"), "import_folder"),
    Command("ledger", "ledger diff A B: the first step, and the first thing, in which two runs with RunLedger "
            "differ; ledger check A: whether one is complete", "nothing", (), "ledger"),
    Command("ls", "list the recipes that come with the collection", "nothing", ("list",), "ls"),
    Command("plan", "does it fit, how long, what does it cost? --gpu h100 --devices 8 --nodes 1 --mfu 0.4 --price 2.5",
            "a recipe", ("estimate", "memory", "dry-run"), "plan"),
    Command("prepare", "turn the recipe's text into token shards, and stop; --rank R --world W: one share of several",
            "a recipe", ("tokenize",), "prepare"),
    Command("runs", "a table of the runs in a folder: steps, validation, tokens, hours, and the settings that differ",
            "nothing", ("history", "experiments", "results"), "runs"),
    Command("schedule", "the learning rate of a recipe as a curve, before any step: --against R2.yaml",
            "a recipe", ("plot", "lr"), "schedule", ("against",)),
    Command("show-data", "training rows as the model gets them, with sources and documents: --rows 10 --first 0",
            "a recipe", ("look", "inspect", "preview", "head"), "show_data"),
    Command("verify-resume", "train some steps straight, and with kill -9 and a resume: are they equal? --config "
            "RECIPE.yaml", "nothing", ("verify", "check-resume"), "verify_resume"),
)  # fmt: skip

COMMANDS: Mapping[str, Command] = {command.name: command for command in _TABLE}


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
