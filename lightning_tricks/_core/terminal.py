"""Text as wide as the terminal, with whole words. Imports nothing but the standard library."""

import shutil
import textwrap

_LEAST = 40  # columns; a narrower terminal breaks lines itself


def terminal_columns(elsewhere: int) -> int:
    """The columns of the terminal, or of `COLUMNS`; in a file or a pipe `elsewhere`."""
    return max(shutil.get_terminal_size((elsewhere, 24)).columns, _LEAST)


def hanging(label: str, text: str, columns: int, indent: int | None = None) -> str:
    """`label` and `text` in lines of at most `columns`, the later ones indented as far as the label is wide.

    Args:
        label: what the first line begins with, blanks included.
        text: in words, none of which is broken.
        columns: of the terminal.
        indent: of the later lines, where it is not the label's width.
    """
    later = " " * (len(label) if indent is None else indent)
    wrapper = textwrap.TextWrapper(columns, initial_indent=label, subsequent_indent=later)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)
