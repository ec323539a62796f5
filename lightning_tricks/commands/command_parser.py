"""The argument parser of the commands that are not Lightning's: a mistake is one line."""

import argparse
from typing import NoReturn

from lightning_tricks._errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are UsageErrors. Its program is named `lightning-tricks COMMAND`."""

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as one line that names the command.

        Raises:
            UsageError: always.
        """
        command = self.prog.split()[1]
        raise UsageError(f"{command}: {message}; {command} --help lists the options")
