"""Text as wide as the terminal, with whole words, and its colours. Imports nothing but the standard library."""

import os
import re
import shutil
import sys
import unicodedata
from typing import TextIO

_LEAST = 40  # columns; a narrower terminal breaks lines itself
_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
ERASE_LINE = "\r\x1b[2K"  # on a terminal, what is printed next replaces the line


def terminal_columns(elsewhere: int) -> int:
    """The columns of the terminal, or of `COLUMNS`; in a file or a pipe `elsewhere`."""
    return max(shutil.get_terminal_size((elsewhere, 24)).columns, _LEAST)


def shows_color(stream: TextIO | None = None) -> bool:
    """Whether a stream, by default standard output, gets colours, see https://no-color.org and https://force-color.org."""
    stream, given = stream or sys.stdout, os.environ.get
    is_terminal = stream is not None and stream.isatty() and given("TERM") != "dumb"
    return not given("NO_COLOR") and (is_terminal or bool(given("FORCE_COLOR")))


def colored(text: str, style: str | None, stream: TextIO | None = None) -> str:
    """The text in a style such as `red` or `bold` where the stream shows colours, see `shows_color`; else as it is."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and shows_color(stream) else text


def width(text: str) -> int:
    """The columns that a line takes: two for a wide character, none for a combining one and for colours."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrapped(text: str, columns: int, indent: int) -> str:
    """The lines of a text, those of more than `columns` columns broken between words and hanging by `indent`.

    Example:
        >>> print(wrapped("learning rate  0.1 at 20,480 tokens", 24, 15))
        learning rate  0.1 at
                       20,480
                       tokens
    """
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for word in re.findall(r"\s*\S+", line):
            if lines[-1].strip() and width(lines[-1] + word) > columns:
                lines.append(" " * indent + word.lstrip())
            else:
                lines[-1] += word
    return "\n".join(lines)
