"""The command line: Lightning's own on a YAML recipe, and one line for each mistake in it.

A command line passes through these files, in this order; `recipe_cli` calls them all:

- `recipe_parser`: arguments and YAML become settings. `recipe_text` refuses mistakes that YAML allows, `parse_errors`
  shortens jsonargparse's complaints to one line, `class_change` decides which settings stay when a class replaces
  another one, `short_names` decides which class a short name means.
- `fit_options`: `resume`, `total_tokens` and `init_from`, the options of `fit` at the top of a recipe.
- `choose_checkpoint`: the checkpoint that the command starts from. `same_checkpoint` gives it to all ranks.
- `run_folder`: the folder that it writes to.
- `run_errors`: while it runs, errors that the user can mend become one line. `lines_of_lightning` drops Lightning's
  advertisements.
- `next_steps`: after a fit, commands to type next.

The commands themselves, but for Lightning's own, are in `lightning_tricks/commands`.
"""

from lightning_tricks.cli.recipe_cli import RecipeCLI, load_recipe, main

__all__ = ["RecipeCLI", "load_recipe", "main"]
