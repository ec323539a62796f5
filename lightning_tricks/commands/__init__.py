"""The commands, each of them one module or folder here, and the registry that reads them. Imports none of them.

Help, suggestions, the table in docs/command_line.md and the shell's completion are made from the registry: a new
command is one new file. It begins with a block of constants, and has a function `run`:

- `NAME`: as it is typed.
- `HELP`: for the list of commands.
- `NEEDS`: what `run` is given.
    - "nothing": `run(args)`, the words after the name.
    - "a recipe": `run(model, datamodule, trainer, *, ...)`, the objects of a recipe, and the Trainer's arguments as a
      mapping: the recipe's devices need not exist here. Its other parameters are options of the command: their types
      and defaults from the signature, their help from the docstring.
    - "a Trainer": the same with a Trainer of one process on this machine; the option `ckpt_path`, if it has one, is a
      checkpoint that can be opened.
    - "a fit": `run(args)` returns the arguments of the `fit` that the command is, and a `FitChange` for it.
- `WORDS`, if there are some: names of other programs for it, which lead to it.
- `RECIPES`, if there are some, of a command on a recipe: options that name the file of one more recipe. `run` gets each
  of them as a `Recipe`.
"""

import argparse
import ast
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from lightning_tricks._errors import UsageError
from lightning_tricks._suggest import did_you_mean

Needs = Literal["nothing", "a recipe", "a Trainer", "a fit"]


@dataclass(frozen=True)
class Command:
    """One command; see the constants above.

    Args:
        module: its name in this package; empty for a command of Lightning's.
        recipes: options that name one more recipe each.
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
    """argparse's parser, whose errors are UsageErrors. Its program is named `lightning-tricks COMMAND`."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as one line that names the command."""
        command = self.prog.split()[1]
        raise UsageError(f"{command}: {message}; {command} --help lists the options")


class FitChange(Protocol):
    """What makes a `fit` another command. The run gets a folder of its own."""

    def change(self, config: Any) -> None:
        """Change the parsed recipe, before its objects are built."""

    def check(self, trainer: Any) -> None:
        """Refuse the run, before it starts; the folders of its loggers are chosen."""

    def options(self) -> list[str]:
        """The options by which `fit` itself would do the same."""


_OF_LIGHTNING = (
    Command(
        "fit",
        "train; --resume auto goes on from the newest whole checkpoint, or starts; --ckpt_path FILE or last; "
        "--init_from FILE starts anew from its weights alone (fine-tuning)",
        "a Trainer",
        ("train", "pretrain", "run"),
    ),
    Command(
        "validate",
        "validation figures of a checkpoint (--ckpt_path FILE, last or none)",
        "a Trainer",
        ("evaluate", "val"),
    ),
    Command("test", "the same on the test set", "a Trainer"),
    Command(
        "predict",
        "log-probability of each token of the test set, to a file (--output FILE.jsonl)",
        "a Trainer",
        ("infer",),
    ),
)


def _read(module: str, file: Path) -> Command | None:
    """The command of a file, by the constants in it; None where it has none."""
    if not file.is_file() or not (block := re.search(r"^NAME = .*?\n\n", file.read_text("utf-8"), re.M | re.S)):
        return None
    constants: dict[str, Any] = {}
    for node in ast.parse(block[0]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = ast.literal_eval(node.value)
    words = tuple(constants.get("WORDS", "").replace("_", "-").split())
    recipes = tuple(constants.get("RECIPES", "").split())
    return Command(constants["NAME"], constants["HELP"], constants["NEEDS"], words, module, recipes)


def _all() -> dict[str, Command]:
    files = [path for path in sorted(Path(__file__).parent.iterdir()) if path.name != "__init__.py"]
    own = [_read(path.stem, path / "__init__.py" if path.is_dir() else path) for path in files]
    return {command.name: command for command in (*_OF_LIGHTNING, *own) if command is not None}


COMMANDS: Mapping[str, Command] = _all()


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
