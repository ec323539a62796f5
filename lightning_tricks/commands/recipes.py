"""The recipes that come with the collection. Imports no torch."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def recipes_folder() -> Path:
    """The folder of the recipes: inside an installed package, or beside the package in a clone."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"
