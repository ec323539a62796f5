"""Entry point of the command line: help, `ls` and `cp` answer at once, the other commands load torch."""

import importlib
import os
import sys

import lightning_tricks
from lightning_tricks._errors import one_line_and_exit
from lightning_tricks._launcher_variables import check_launcher_variables
from lightning_tricks.commands import COMMANDS

HELP = """\
usage: python -m lightning_tricks COMMAND --config RECIPE.yaml [--config MORE.yaml] [--key.subkey VALUE ...]

Train and evaluate language models from YAML recipes, with PyTorch Lightning.

  fit        train; --resume auto goes on from the newest whole checkpoint, or starts; --ckpt_path FILE or last;
             --init_from FILE starts anew from its weights alone (fine-tuning)
  validate   validation figures of a checkpoint (--ckpt_path FILE, last or none)
  test       the same on the test set
  predict    log-probability of each token of the test set, to a file (--output FILE.jsonl)
  prepare    turn the recipe's text into token shards, and stop

  ls         list the recipes that come with the collection
  cp NAME    copy one, to change it

  branch     start a decay from a checkpoint of the stable part of a run: --ckpt_path FILE --decay_steps N
  generate   continue a text: --ckpt_path FILE --prompt "..."
  consolidate FOLDER FILE   make one checkpoint file of a sharded one
  coordinate-check --config RECIPE.yaml   do activations keep their size at widths 64 to 1024? Flat with muP
  autopsy    rank the documents of one optimizer step: --config RECIPE.yaml --ckpt_path FILE --step N
  verify-resume --config RECIPE.yaml   train some steps straight, and with kill -9 and a resume: are they equal?
  ledger diff A B   the first step, and the first thing, in which two runs with RunLedger differ; ledger check A

  COMMAND --help prints all that a command takes; --help and --version work alone.

first run: python -m lightning_tricks cp tiny . && python -m lightning_tricks fit --config tiny.yaml
"""


def run(args: list[str]) -> None:
    """Carry out one command line, without the program's name."""
    if args and (name := args[0].replace("_", "-")) in (*COMMANDS, "coordinate-check"):
        args = [name, *args[1:]]  # verify_resume is verify-resume
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    check_launcher_variables(os.environ)
    if args[0] == "--version":
        print(f"lightning-tricks {lightning_tricks.__version__}")
    elif args[0] in COMMANDS:
        file = importlib.import_module(f"lightning_tricks.commands.{COMMANDS[args[0]]}")
        command = getattr(file, "run", None) or getattr(file, args[0].replace("-", "_"))
        command(args[1:])
    else:
        # To be set before torch loads its thread pool, whose threads spin while they wait for each other. On two cores,
        # of which another program wanted one, that made tiny.yaml 8 times slower; a hundredth of the spins, 2.6 times.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        from lightning_tricks import cli

        if args[0] == "branch":
            cli.branch(args[1:])
        elif args[0] == "coordinate-check":
            cli.coordinate_check_command(args[1:])
        else:
            cli.main(args)


def main() -> None:
    """Entry point of `python -m lightning_tricks` and `lightning-tricks`: a mistake is one line and exit code 2."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.insert(0, here)  # as `python -m` does; a console script's own folder stands there instead
    with one_line_and_exit():
        run(sys.argv[1:])


if __name__ == "__main__":
    main()
