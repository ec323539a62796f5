"""Which Lightning the collection builds on: `lightning` or `pytorch_lightning`, decided once, at first import.

The two packages hold the same code, but a Trainer of one refuses plugins and strategies of the other. So we follow the
program: the package that it has imported already, `lightning` if it has imported neither or both. The environment
variable `LIGHTNING_TRICKS_BACKEND` (`lightning` or `pytorch_lightning`) forces the choice.

Its Trainer takes our strategies by the names of `STRATEGY_NAMES`, too.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_tricks._core.errors import OneLineWarning, UsageError
from lightning_tricks._core.quote import printable

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _choose() -> str:
    forced = os.environ.get("LIGHTNING_TRICKS_BACKEND")
    if forced:
        if forced not in _PACKAGES:
            raise UsageError(f"LIGHTNING_TRICKS_BACKEND={forced!r}: give one of {', '.join(_PACKAGES)}")
        return forced
    only_classic = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if only_classic else "lightning"


BACKEND = _choose()


if TYPE_CHECKING:
    import lightning.pytorch as pl

    rank_zero_only: Any  # Lightning sets an attribute `rank` on this function, which its type does not have
else:
    pl = importlib.import_module(_PACKAGES[BACKEND])
    rank_zero_only = pl.utilities.rank_zero_only

# `Trainer(strategy="fsdp2")` imports the class when it makes one.
STRATEGY_NAMES = {"fsdp2": "FSDP2Strategy", "deepspeed_zero": "DeepSpeedZeROStrategy"}


def _make_strategy(class_name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("lightning_tricks"), class_name)(**options)


for _name, _class_name in STRATEGY_NAMES.items():
    pl.strategies.StrategyRegistry.register(_name, partial(_make_strategy, _class_name), override=True)

Trainer = pl.Trainer
Module = pl.LightningModule  # as short as this, the signature of most hooks fits on a line


def rank_zero_info(*lines: str) -> None:
    """Lightning's, with each text on a line of its own, whatever names of others stand in it."""
    pl.utilities.rank_zero_info("\n".join(map(printable, lines)), stacklevel=5)


def rank_zero_warn(*lines: str) -> None:
    """Lightning's, as above; our command line prints it without a source path."""
    pl.utilities.rank_zero_warn("\n".join(map(printable, lines)), stacklevel=5, category=OneLineWarning)


@contextmanager
def only_warn(consequence: str) -> Iterator[None]:
    """For the hook `on_exception`: an error inside the `with` becomes a warning that begins with `consequence`.

    After an error of CUDA, every call on that device raises. Without this, the user would see the hook's own error, and
    the `on_exception` of later callbacks would not be called.
    """
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{consequence}: {type(error).__name__}: {error}")


class WarnOnce:
    """Gives each warning once, on rank 0; `again` allows one to be given anew."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, what: str, line: str) -> None:
        """Warn by `line`, unless a warning of this `what` was given."""
        if what not in self._given:
            self._given.add(what)
            rank_zero_warn(line)

    def has_given(self, what: str) -> bool:
        """Whether a warning of this `what` was given, where it is costly to find out whether one is due."""
        return what in self._given

    def again(self, what: str = "") -> None:
        """Forget that the warning `what` was given; without a name, that any was."""
        self._given = self._given - {what} if what else set()
