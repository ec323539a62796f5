"""Import torchao, late and with one line for what is wrong with it."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from lightning_tricks._errors import UsageError


def make_stand_in(recipe: str, emulate: bool) -> nn.Linear:
    """A converted layer to take class and settings from; importing torchao is put off until here.

    Raises:
        UsageError: torchao is missing or too old.
    """
    needed = "0.18" if recipe == "mxfp8" else "0.17"
    try:
        found = version("torchao")
    except PackageNotFoundError:
        raise UsageError("plugins: Float8 needs torchao: pip install 'lightning_tricks[fp8]'") from None
    if _numbers(found) < _numbers(needed):
        raise UsageError(
            f"plugins: Float8(recipe={recipe!r}) needs torchao {needed} or later, found {found}: "
            "pip install -U 'lightning_tricks[fp8]'"
        )
    with _quiet():
        if recipe == "mxfp8":
            from lightning_tricks.precision.float8 import torchao_mx

            return torchao_mx.stand_in(emulate)
        from lightning_tricks.precision.float8 import torchao_linear

        return torchao_linear.stand_in(recipe, emulate)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchao's lines on kernels of its own that this machine cannot load: its float8 layers use torch's."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
