"""Files that a folder of others names, by an index, a record or a link: they must lie in it.

A link in such a folder may lead to any file of this machine, whose content would then be loaded, written elsewhere or
told in an error.
"""

import os
from pathlib import Path

from lightning_tricks._core.errors import UsageError


def is_inside(folder: Path, file: Path) -> bool:
    """Whether a file lies in a folder, or in the Hugging Face cache that the folder belongs to; links are followed.

    That cache keeps `models--X/snapshots/REVISION/FILE` as links to `models--X/blobs/HASH`.
    """
    root, place = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    snapshots = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), root).parent
    blobs = [snapshots.parent / "blobs"] if snapshots.parent.name.startswith("models--") else []
    return any(place.is_relative_to(each) for each in (root, *blobs))


def inside(folder: Path, file: Path) -> Path:
    """The file, there or not.

    Raises:
        UsageError: it lies outside of the folder, see `is_inside`.
    """
    if not is_inside(folder, file):
        raise UsageError(
            f"{folder}: {file.name} is {os.path.realpath(file)}, which is outside of it: take a folder that you trust, "
            "or copy the file into this one"
        )
    return file


def check_run_folder(root: Path, folder: Path) -> None:
    """Refuse a folder below `root` that leads out of it by a link.

    Raises:
        UsageError: it does, and is no place to look for a checkpoint that nobody has named.
    """
    if not is_inside(root, folder):
        raise UsageError(
            f"{folder}: this leads to {os.path.realpath(folder)}, which is outside of {root}: give the path of its "
            "checkpoint by --ckpt_path, if you trust it"
        )


def check_links(folder: Path) -> None:
    """Refuse a folder to write to in which a link leads out of it: what is written would change a file elsewhere."""
    for place in (folder, folder / "checkpoints"):
        for file in place.iterdir() if place.is_dir() else ():
            if file.is_symlink():
                inside(folder, file)
