"""Text as wide as the terminal, with whole words. Imports nothing but the standard library."""

import shutil
import textwrap

_LEAST = 40  # columns; a narrower terminal breaks lines itself


def terminal_columns(elsewhere: int) -> int:
    """The columns of the terminal, or of `COLUMNS`; in a file or a pipe `elsewhere`."""
    return max(shutil.get_terminal_size((elsewhere, 24)).columns, _LEAST)


def wrapped(text: str, columns: int, indent: int) -> str:
    """The lines of a text, those of more than `columns` characters broken between words and hanging by `indent`.

    Example:
        >>> print(wrapped("learning rate  0.1 at 20,480 tokens", 24, 15))
        learning rate  0.1 at
                       20,480
                       tokens
    """
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=" " * indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(line if len(line) <= columns else wrapper.fill(line) for line in text.split("\n"))
