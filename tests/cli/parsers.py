"""One parser of the command line for many command lines: to build it takes longer than to use it."""

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
