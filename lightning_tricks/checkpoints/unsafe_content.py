"""Find, already at a save, the objects that would keep a checkpoint from opening with `weights_only=True`."""

import io
import pickletools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_tricks.checkpoints.snapshot import TensorPickler


def unsafe_content(checkpoint: dict[str, Any], file: Path) -> list[str]:
    """The entries of a checkpoint that only `weights_only=False` lets in, each with its class: `a.b (pathlib.Path)`.

    Reads the names in the file's pickle, which needs neither tensors nor the objects; the entries are looked for only
    if there is such a name.

    Args:
        checkpoint: as it was saved.
        file: what `torch.save` made of it.

    Source: https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    try:
        names = set(get_unsafe_globals_in_checkpoint(str(file)))
    except UnpicklingError as error:  # a number of more than 255 bytes
        return [str(error)]
    return [
        f"{'.'.join(path)} ({_class_name(value)})" for path, value in _leaves(checkpoint) if names & _globals(value)
    ]


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Everything in plain containers, a dict's keys too, that is no tensor, with the keys that lead to it."""
    entries: Iterable[tuple[Any, Any]] = ()
    if type(tree) in (dict, OrderedDict):
        yield from (((*path, str(key)), key) for key in tree)
        entries = tree.items()
    elif type(tree) in (list, tuple):
        entries = enumerate(tree)
    elif not isinstance(tree, Tensor):
        yield path, tree
    for key, value in entries:
        yield from _leaves(value, (*path, str(key)))


def _globals(value: Any) -> set[str]:
    """The classes and functions that a value's pickle names."""
    pickled = io.BytesIO()
    TensorPickler(pickled, protocol=2).dump(value)
    steps = pickletools.genops(pickled.getvalue())
    return {str(name).replace(" ", ".") for opcode, name, _ in steps if opcode.name == "GLOBAL"}


def _class_name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
