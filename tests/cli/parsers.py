"""Fixtures by which many command lines of one process share their parsers: to build one takes longer than to use it."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def one_parser() -> Any:
    """Build each command's parser once a file, for all its tests and for what they share."""
    from lightning_tricks.cli import RecipeCLI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecipeCLI, "setup_parser", once({}))
        yield


@pytest.fixture
def shared_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build each command's parser once for the tests of a file that ask for it, and anew for the others."""
    from lightning_tricks.cli import RecipeCLI

    monkeypatch.setattr(RecipeCLI, "setup_parser", once(OF_FILES.setdefault(request.path, {})))


@pytest.fixture
def no_hyper_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no hyper-parameters for Lightning's checkpoints: that takes as long as reading the command line."""
    from lightning_tricks.cli import RecipeCLI

    monkeypatch.setattr(RecipeCLI, "_dump_config", lambda cli: setattr(cli, "config_dump", {}))


OF_FILES: dict[Any, dict[Any, Any]] = {}


def once(built: dict[Any, Any]) -> Callable[..., None]:
    """A `setup_parser` that takes what is in `built`, and puts there what it builds."""
    from lightning_tricks.cli import RecipeCLI

    names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
    real = RecipeCLI.setup_parser

    def setup_parser(self: Any, with_commands: bool, *args: Any) -> None:
        key = with_commands, frozenset(self.subcommands().keys() & self._given)
        if key not in built:
            real(self, with_commands, *args)
            built[key] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        vars(self).update(built[key])

    return setup_parser
