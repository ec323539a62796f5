"""The one exception for a user's mistake: its message is a single line, and the command line prints only that."""


class UsageError(ValueError):
    """Bad input: the message names the option, the value it was given and what to do instead.

    The command line prints the message and exits with code 2; from Python it is an ordinary `ValueError`.
    """
