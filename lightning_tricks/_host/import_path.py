"""Where Python looks for modules: in the current folder last, and only for what a recipe names.

A recipe names classes of the folder in which it is used. The folder may also be a stranger's, whose logs are looked at:
a file `yaml.py` in it must not be taken for the package. Nothing is imported here but what Python has loaded before it
looks into any folder.
"""

import os
import sys

_named: set[str] = set()  # modules, by the texts of recipes and options


def without_current_folder(path: list[str], here: str, named: str = "") -> list[str]:
    """A `sys.path` without the entries of the current folder that stand before the standard library.

    `python -m` puts one there, and so does an empty entry of PYTHONPATH.

    Args:
        path: as `sys.path`.
        here: the current folder.
        named: PYTHONPATH, whose absolute paths are the user's own choice and stay.
    """
    library = os.path.dirname(os.__file__)
    before = path.index(library) if library in path else len(path)
    kept = set(filter(os.path.isabs, named.split(os.pathsep)))
    here = os.path.realpath(here)
    return [each for each in path[:before] if each in kept or os.path.realpath(each) != here] + path[before:]


def leave_current_folder() -> None:
    """Take the current folder away from before the standard library; a folder that was removed has no entry."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    sys.path[:] = without_current_folder(sys.path, here, os.environ.get("PYTHONPATH", ""))


class FolderOfRecipe:
    """Finds modules of a folder after all others, from the first on that a recipe or an option names.

    Until then nothing is: torch and Lightning try to import packages that may be missing, such as `matplotlib`, and
    Python some modules of Windows, which would be taken from any folder. The named module may need its neighbours.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Python's question to each finder in `sys.meta_path`."""
        if path is not None or name not in _named or self.folder in sys.path:
            return None
        from importlib.machinery import PathFinder

        found = PathFinder.find_spec(name, [self.folder])
        if found is not None:
            sys.path.append(self.folder)  # which processes that are started anew get, too
        return found


def find_modules_of_recipe() -> None:
    """Let modules of the current folder be found where a recipe names one; not under `python -P`, which says no."""
    here = os.getcwd()
    if not sys.flags.safe_path and not any(getattr(one, "folder", None) == here for one in sys.meta_path):
        sys.meta_path.append(FolderOfRecipe(here))  # type: ignore[arg-type]


def name_modules(text: str) -> None:
    """Note the modules that a text names: `mine` of `class_path: mine.Model`."""
    import re  # here, as the current folder is first when this file is imported

    _named.update(re.findall(r"(?<![\w.])([^\W\d]\w*)\.(?=[^\W\d])", text))
