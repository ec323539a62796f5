"""Where Python looks for modules: the current folder last, and only for commands that read a recipe.

A recipe names classes of the folder in which it is used. The folder may also be a stranger's, whose logs are looked at:
a file `yaml.py` in it must not be taken for the package. Nothing is imported here but what Python has loaded before it
looks into any folder.
"""

import os
import sys


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


def append_current_folder() -> None:
    """Let modules of the current folder be found after all others; not under `python -P`, which says no."""
    here = os.getcwd()
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.append(here)
