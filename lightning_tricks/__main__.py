"""Entry point of the command line: help, and commands that need no recipe, answer before torch is imported."""

import sys

from lightning_tricks._host.import_path import find_modules_of_recipe, leave_current_folder, name_modules

if __name__ == "__main__":  # `python -m` has put the current folder first: from here on, nothing is imported from it
    leave_current_folder()

import os

import lightning_tricks
from lightning_tricks._core.errors import UsageError, one_line_and_exit
from lightning_tricks._core.terminal import terminal_columns, wrapped
from lightning_tricks._host.process import check_launcher_variables
from lightning_tricks.commands import COMMANDS, GROUPS, find

_HELP = """\
usage: python -m lightning_tricks COMMAND --config RECIPE.yaml
           [--config MORE.yaml] [--key.subkey VALUE ...]

Train and evaluate language models from YAML recipes, with PyTorch Lightning.
COMMAND --help prints what a command takes.

{commands}

first run: python -m lightning_tricks cp tiny .
           python -m lightning_tricks fit --config tiny.yaml
"""


def help_text() -> str:
    """All commands by their use, each with its help."""
    width = max(map(len, COMMANDS)) + 4
    rows = {use: [f"  {each.name}".ljust(width) + each.help for each in group] for use, group in GROUPS.items()}
    text = _HELP.format(commands="\n".join("\n".join([f"{use}:", *rows[use]]) for use in rows))
    return wrapped(text, terminal_columns(120), width)


def run(args: list[str]) -> None:
    """Carry out one command line, without the program's name."""
    if not args or args[0] in ("-h", "--help"):
        print(help_text(), end="")
        return
    check_launcher_variables(os.environ)
    if args[0] == "--version":
        print(f"lightning-tricks {lightning_tricks.__version__}")
        return
    if not args[0].startswith("-"):
        command = find(args[0])
        args = [command.name, *args[1:]]  # verify_resume is verify-resume
        if command.needs == "nothing":
            command.load().run(args[1:])
            return
    find_modules_of_recipe()
    name_modules("\n".join(args))
    # To be set before torch loads its thread pool, whose threads spin while they wait for each other. On two cores,
    # of which another program wanted one, that made tiny.yaml 8 times slower; a hundredth of the spins, 2.6 times.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from lightning_tricks import cli

    cli.main(args)


def main() -> None:
    """Entry point of `python -m lightning_tricks` and `lightning-tricks`: a mistake is one line and exit code 2."""
    with one_line_and_exit():
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UsageError("the current folder has been removed: go to another one") from None
        leave_current_folder()  # for a console script too, where an empty entry of PYTHONPATH has put it first
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
