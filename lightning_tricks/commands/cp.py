"""`cp`: copy a recipe that comes with the collection, to start from. Imports no torch."""

import os
import shutil
from pathlib import Path

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.quote import say
from lightning_tricks._core.suggest import did_you_mean
from lightning_tricks._host.writable import check_folder
from lightning_tricks.commands import CommandParser, recipes_folder


def run(args: list[str]) -> None:
    """Copy a recipe, with the parts it includes; a part that is there already with the same text is left as it is."""
    parser = CommandParser("cp", description="Copy a recipe, to change it.")
    parser.add_argument("recipe", help="its name, as `ls` prints it")
    parser.add_argument("to", nargs="?", default=".", help="folder or new file name (default: this folder)")
    options = parser.parse_args(args)
    source = recipes_folder() / f"{options.recipe.removesuffix('.yaml')}.yaml"
    if not source.is_file():
        near = did_you_mean(options.recipe, [recipe.stem for recipe in recipes_folder().glob("*.yaml")])
        raise UsageError(f"no recipe named {options.recipe!r}{near}: `ls` prints the names")
    target = Path(options.to)
    if target.is_dir() or options.to.endswith("/"):
        target = target / source.name
    text = source.read_text(encoding="utf-8")
    parts = [part for part in sorted((source.parent / "parts").glob("*.yaml")) if f"parts/{part.name}" in text]
    copies = [(part, target.parent / "parts" / part.name) for part in parts]
    copies = [(one, copy) for one, copy in copies if not (copy.is_file() and one.read_bytes() == copy.read_bytes())]
    copies = [(source, target), *copies]
    for _, copy in copies:
        if os.path.lexists(copy):
            raise UsageError(f"{copy} exists: name another place, or remove it first")
    for folder in {copy.parent for _, copy in copies}:
        check_folder("cp: to", folder)
    for origin, copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copy)
        say(copy)
