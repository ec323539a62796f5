"""The command line: Lightning's own on a YAML recipe, and one line for each mistake in it."""

from lightning_tricks.cli.recipe_cli import RecipeCLI, load_recipe, main

__all__ = ["RecipeCLI", "load_recipe", "main"]
