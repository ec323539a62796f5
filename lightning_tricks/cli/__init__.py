"""The command line: Lightning's own on a YAML recipe, and one line for each mistake in it.

A command line passes through these files, in this order; `recipe_cli` calls them all:

- `recipe_parser`: arguments and YAML become settings. `recipe_text` refuses mistakes that YAML allows, `parse_errors`
  shortens jsonargparse's complaints to one line, `class_change` decides what a class that replaces another one keeps.
- `choose_checkpoint`: the checkpoint that the command starts from.
- `run_folder`: the folder that it writes to.
- `run_errors`: while it runs, errors that the user can mend become one line.
- `next_steps`: after a fit, commands to type next.

`branch_cli` is the command `branch`: a fit whose recipe gets another end. `coordinate_check_command` builds a recipe's
model at several widths.
"""

from lightning_tricks.cli.branch_cli import branch
from lightning_tricks.cli.coordinate_check_command import coordinate_check_command
from lightning_tricks.cli.recipe_cli import RecipeCLI, load_recipe, main

__all__ = ["RecipeCLI", "branch", "coordinate_check_command", "load_recipe", "main"]
