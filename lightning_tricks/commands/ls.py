"""`ls`: list the recipes that come with the collection. Imports no torch."""

import sys

from lightning_tricks._core.terminal import colored, terminal_columns, wrapped
from lightning_tricks.commands import CommandParser, recipes_folder
from lightning_tricks.commands.answers import add_json, check_files, json_text, write_answers

_FIRST = ("tiny", "moe_tiny", "small")  # those that a laptop trains


def run(args: list[str]) -> None:
    """Print one line for each recipe, its name and its title: those of a laptop first."""
    parser = CommandParser("lightning-tricks ls", description="List the recipes that come with the collection.")
    add_json(parser)
    options = parser.parse_args(args)
    check_files("ls", options)
    titles = {}
    for recipe in sorted(recipes_folder().glob("*.yaml")):
        with recipe.open(encoding="utf-8") as file:
            titles[recipe.stem] = file.readline().lstrip("#").strip()
    titles = {name: titles[name] for name in (*_FIRST, *(each for each in titles if each not in _FIRST))}
    width = max(map(len, titles)) + 2
    lines = "\n".join(colored(name, "bold") + f"{'':{width - len(name)}}{title}" for name, title in titles.items())
    records = [{"name": name, "title": title} for name, title in titles.items()]
    write_answers(
        options, lambda: wrapped(lines, terminal_columns(sys.maxsize), width), json=lambda: json_text(records)
    )
