"""Choose among the classes that share a short name: ours, else torch's, else Lightning's; know the field's short forms.

pytorch_optimizer and heavyball have an AdamW, an SGD and a Muon each; jsonargparse refuses a name that several have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonargparse._typehints as typehints

from lightning_tricks._replaced import replaced

ALIASES = {"WSD": "WarmupStableDecay"}
FIRST = ("lightning_tricks", "torch", "lightning", "pytorch_lightning")


@contextmanager
def known_names_first() -> Iterator[None]:
    """Inside the `with`, a short name that several classes have is that of the first of these packages; see ALIASES."""
    original = typehints.resolve_class_path_by_name

    def resolve(cls: Any, name: str) -> str:
        name = ALIASES.get(name, name)
        try:
            return original(cls, name)
        except ValueError:
            paths = [path for path in typehints.get_all_subclass_paths(cls) if path.rpartition(".")[2] == name]
            for package in FIRST:
                own = [path for path in paths if path.partition(".")[0] == package]
                if len(own) == 1:
                    return own[0]
            raise

    with replaced(typehints, "resolve_class_path_by_name", resolve):
        yield
