"""`ls`: list the recipes that come with the collection. Imports no torch."""

import sys

from lightning_tricks._core.terminal import terminal_columns, wrapped
from lightning_tricks.commands import CommandParser, recipes_folder


def run(args: list[str]) -> None:
    """Print one line for each recipe: its name and its title."""
    CommandParser("lightning-tricks ls", description="List the recipes that come with the collection.").parse_args(args)
    recipes = sorted(recipes_folder().glob("*.yaml"))
    width = max(len(recipe.stem) for recipe in recipes)
    for recipe in recipes:
        with recipe.open(encoding="utf-8") as file:
            title = file.readline().lstrip("#").strip()
        print(wrapped(f"{recipe.stem:{width}s}  {title}", terminal_columns(sys.maxsize), width + 2))
