"""PyTorch Lightning, ready to pretrain language models.

`__init__.pyi` lists the public names, for type checkers, for editors and for the code below. A name is imported when it
is first used, so that `import lightning_tricks` costs nothing. In an installed wheel, `llms.txt` beside this file lists
commands, recipes and classes by their use.
"""

# No other imports: `python -m` still has the current folder first here, see `_import_path`.
import importlib
import os
import sys

__version__ = "0.1.0"


def _modules_of_names() -> dict[str, str]:
    """The module of each public name; each line of the list is `from MODULE import NAME as NAME`."""
    with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in imports}


_MODULE_OF = _modules_of_names()
__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> object:
    """Import the module of a public name when the name is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'lightning_tricks' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if not sys.modules.keys().isdisjoint(("lightning.pytorch", "pytorch_lightning")):
    importlib.import_module("lightning_tricks._trainer.lightning")  # for `Trainer(strategy="fsdp2")`
