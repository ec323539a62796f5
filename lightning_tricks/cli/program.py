"""The command that started this process, for hints that a user can type again."""

import os
import sys
from typing import Any


def program() -> str:
    """`python -m lightning_tricks`, `lightning-tricks`, `python train.py`: the command line before its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    script = sys.argv[0] if sys.argv else ""
    if script.endswith(".py"):
        return f"python {short(script)}"
    return os.path.basename(script) or "python -m lightning_tricks"


def short(path: Any) -> str:
    """The path from the working folder, where it lies below that."""
    return str(path).removeprefix(os.getcwd() + os.sep)
