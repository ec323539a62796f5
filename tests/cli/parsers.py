"""What command lines of one process need not do again: to build a parser takes longer than to use it."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def one_parser() -> Any:
    """Build each command's parser once a file."""
    from lightning_tricks.cli import RecipeCLI

    built: dict[tuple[bool, frozenset[str]], Any] = {}
    names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
    real = RecipeCLI.setup_parser

    def once(self: Any, with_commands: bool, *args: Any) -> None:
        key = with_commands, frozenset(self.subcommands().keys() & self._given)
        if key not in built:
            real(self, with_commands, *args)
            built[key] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        vars(self).update(built[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecipeCLI, "setup_parser", once)
        yield


@pytest.fixture(scope="module")
def no_hyper_parameters() -> Any:
    """Write no hyper-parameters for Lightning's checkpoints: that takes as long as reading the command line."""
    from lightning_tricks.cli import RecipeCLI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecipeCLI, "_dump_config", lambda cli: setattr(cli, "config_dump", {}))
        yield
