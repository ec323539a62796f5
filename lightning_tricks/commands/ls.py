"""`ls`: list the recipes that come with the collection. Imports no torch."""

import re
import sys

from lightning_tricks._core.terminal import colored, terminal_columns, wrapped
from lightning_tricks.commands import CommandParser, recipes_folder
from lightning_tricks.commands.answers import add_json, check_files, json_text, write_answers


def run(args: list[str]) -> None:
    """Print one line for each recipe, the smallest model first: its name and its title."""
    parser = CommandParser("ls", description="List the recipes that come with the collection.")
    add_json(parser)
    options = parser.parse_args(args)
    check_files("ls", options)
    titles = {}
    for recipe in sorted(recipes_folder().glob("*.yaml"), key=lambda recipe: _size(recipe.stem)):
        with recipe.open(encoding="utf-8") as file:
            titles[recipe.stem] = file.readline().lstrip("#").strip()
    width = max(map(len, titles)) + 2
    lines = "\n".join(colored(name, "bold") + f"{'':{width - len(name)}}{title}" for name, title in titles.items())
    records = [{"name": name, "title": title} for name, title in titles.items()]
    write_answers(
        options, lambda: wrapped(lines, terminal_columns(sys.maxsize), width), json=lambda: json_text(records)
    )


def _size(name: str) -> tuple[int, int]:
    """Millions of parameters by a recipe's name, `8x7b` or `124m`, else 0; of one size, the shorter name first."""
    found = re.search(r"(?:(\d+)x)?(\d+)([mb])", name)
    return int(found[1] or 1) * int(found[2]) * (1000 if found[3] == "b" else 1) if found else 0, len(name)
