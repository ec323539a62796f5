"""The command line: Lightning's own on a YAML recipe, and one line for each mistake in it.

A command line passes through these files, in this order; `recipe_cli` calls them all:

- `recipe_parser`: arguments and YAML become settings; which class a short name means, and which settings stay when a
  class replaces another one.
- `help`: the answer to `--help`, of a command and of a class.
- `fit_options`: `resume`, `total_tokens` and `init_from`, the options of `fit` at the top of a recipe; values that
  Lightning accepts and fails on later.
- `choose_checkpoint`: the checkpoint that the command starts from, the same one on all ranks.
- `run_folder`: the folder that it writes to.
- `before_launch`: what this machine cannot run, while there is one process.
- `error_lines`: jsonargparse's complaints, and errors of the run that the user can mend, become one line.
- `next_steps`: after a fit, commands to type next.

The commands themselves, but for Lightning's own, are in `lightning_tricks/commands`.
"""

from lightning_tricks.cli.recipe_cli import RecipeCLI, load_recipe, main

__all__ = ["RecipeCLI", "load_recipe", "main"]
