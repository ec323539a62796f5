"""`ls` and `cp`: show the recipes that come with the collection, and copy one to start from. Imports no torch."""

import shutil
from pathlib import Path

from lightning_tricks._errors import UsageError
from lightning_tricks._suggest import did_you_mean
from lightning_tricks._writable import check_folder
from lightning_tricks.commands.command_parser import CommandParser

_PACKAGE = Path(__file__).resolve().parent.parent


def recipes_folder() -> Path:
    """The folder of the recipes: inside an installed package, or beside the package in a clone."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def ls(args: list[str]) -> None:
    """Print one line for each recipe: its name and its title."""
    CommandParser("lightning-tricks ls", description="List the recipes that come with the collection.").parse_args(args)
    recipes = sorted(recipes_folder().glob("*.yaml"))
    width = max(len(recipe.stem) for recipe in recipes)
    for recipe in recipes:
        with recipe.open(encoding="utf-8") as file:
            print(f"{recipe.stem:{width}s}  {file.readline().lstrip('#').strip()}")


def cp(args: list[str]) -> None:
    """Copy a recipe, with the parts it includes; a part that is there already with the same text is left as it is.

    Raises:
        UsageError: there is no such recipe, or one of the files exists; nothing is copied then.
    """
    parser = CommandParser("lightning-tricks cp", description="Copy a recipe, to change it.")
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
    parts = [(part, target.parent / "parts" / part.name) for part in parts_of(source)]
    copies = [(source, target), *(pair for pair in parts if not _same_file(*pair))]
    for _, copy in copies:
        if copy.exists():
            raise UsageError(f"{copy} exists: name another place, or remove it first")
    for folder in {copy.parent for _, copy in copies}:
        check_folder("cp: to", folder)
    for origin, copy in copies:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, copy)
        print(copy)


def _same_file(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def parts_of(recipe: Path) -> list[Path]:
    """The files in parts/ that a recipe includes by name."""
    text = recipe.read_text(encoding="utf-8")
    return [part for part in sorted((recipe.parent / "parts").glob("*.yaml")) if f"parts/{part.name}" in text]
