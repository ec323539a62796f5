"""Text as wide as the terminal, with whole words, and its colours. Imports nothing but the standard library."""

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from typing import Any, TextIO

_LEAST = 40  # columns; a narrower terminal breaks lines itself
_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
ERASE_LINE = "\r\x1b[2K"  # on a terminal, what is printed next replaces the line
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def terminal_columns(elsewhere: int) -> int:
    """The columns of the terminal, or of `COLUMNS`; in a file or a pipe `elsewhere`."""
    return max(shutil.get_terminal_size((elsewhere, 24)).columns, _LEAST)


def shows_color(stream: TextIO | None = None) -> bool:
    """Whether to colour what is written to a stream, by default standard output: a terminal, or FORCE_COLOR is set.

    NO_COLOR is stronger than both. Source: https://no-color.org, https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    stream = stream or sys.stdout
    is_terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return is_terminal or bool(os.environ.get("FORCE_COLOR"))


def colored(text: str, style: str | None, stream: TextIO | None = None) -> str:
    """The text in a style such as `red` or `bold` where the stream shows colours, see `shows_color`; else as it is."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and shows_color(stream) else text


def width(text: str) -> int:
    """The columns that a line takes: two for a wide character, none for a combining one and for colours."""
    text = _ESCAPE.sub("", text)
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


class _Shown(str):
    """A part of a line, as long as it is wide."""

    __slots__ = ()

    def __len__(self) -> int:
        return width(str(self))


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[Any]:
        return list(map(_Shown, super()._split(text)))


def wrapped(text: str, columns: int, indent: int) -> str:
    """The lines of a text, those of more than `columns` columns broken between words and hanging by `indent`.

    Example:
        >>> print(wrapped("learning rate  0.1 at 20,480 tokens", 24, 15))
        learning rate  0.1 at
                       20,480
                       tokens
    """
    wrapper = _Wrapper(columns, subsequent_indent=" " * indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(line if width(line) <= columns else wrapper.fill(line) for line in text.split("\n"))
