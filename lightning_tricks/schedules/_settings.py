"""Checks that every schedule makes of its own settings: one line that names the option, its value and what to give."""

from lightning_tricks._errors import UsageError


def check_whole(owner: object, option: str, least: int = 0) -> None:
    """Refuse an option of `owner` that is no whole number of `least` or more.

    Raises:
        UsageError: it is a float, a bool, NaN or too small.
    """
    value = getattr(owner, option)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{type(owner).__name__}.{option}={value!r}: give a whole number, {least} or more")


def check_share(owner: object, option: str) -> None:
    """Refuse an option of `owner` that is no number between 0 and 1, both included.

    Raises:
        UsageError: it is outside, NaN or no number.
    """
    value = getattr(owner, option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"{type(owner).__name__}.{option}={value!r}: give a number between 0 and 1")
