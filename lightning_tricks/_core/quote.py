"""Quotes names, paths and settings of others for the place where they are written.

A folder, a metric, a tensor or a setting may be named by a stranger, with line ends, quotes, escape sequences of a
terminal or bytes that are no UTF-8. Whoever writes one into YAML, a shell line, HTML, Markdown, or a line that a person
reads, takes the function of that place here; JSON is `json.dumps`.
"""

import html
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Any, TextIO

_LONGEST = 4000  # characters of an error line: longer ones lose their middle, and keep option and remedy


def printable(text: object) -> str:
    r"""A text on one line: what is no letter, digit, sign or blank becomes an escape, such as `\n` or `\u202e`.

    So no name ends a line, moves the cursor, or turns the direction of what follows.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def printable_lines(text: object) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(map(printable, str(text).split("\n")))


def error_line(text: object) -> str:
    """`printable`, of a length that a terminal shows."""
    line = printable(text)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1000]} [...] {line[-1000:]}"


def say(*lines: object, file: TextIO | None = None) -> None:
    """Print each text as one line, and at once."""
    print(*map(printable, lines), sep="\n", file=file or sys.stdout, flush=True)


def yaml_text(value: Any, *, one_line: bool = False) -> str:
    """A value as YAML, without the last line end; a setting keeps its place whatever its text is.

    Args:
        value: of plain types.
        one_line: whether to write it so that it may stand behind `name: `, or inside of braces.
    """
    import yaml  # here, as commands that need no YAML start without it

    class Dumper(yaml.SafeDumper):
        pass

    def text_node(dumper: Any, text: str) -> Any:  # in double quotes alone, line ends and the like have escapes
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    Dumper.add_representer(str, text_node)

    def dump(allow_unicode: bool) -> str:
        layout: dict[str, Any] = {"default_flow_style": True, "width": math.inf} if one_line else {"width": 120}
        inside = [value] if one_line else value  # of a list in brackets, where more characters need quotes
        text = yaml.dump(inside, Dumper=Dumper, sort_keys=False, allow_unicode=allow_unicode, **layout)
        text = str(text).removesuffix("\n")
        return text[1:-1] if one_line else text.removesuffix("\n...")

    text = dump(allow_unicode=True)
    return text if all(line.isprintable() for line in text.split("\n")) else dump(allow_unicode=False)


def shell_word(word: object) -> str:
    r"""A word of a command to paste, on one line; one that is not printable as bash and zsh read it, `$'\n'`."""
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)

    def part(char: str) -> str:
        if char in "\\'":
            return f"\\{char}"
        return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))

    return "$'" + "".join(map(part, text)) + "'"


def shell_line(words: Iterable[object]) -> str:
    """A command to paste."""
    return " ".join(map(shell_word, words))


def html_text(text: object) -> str:
    """A text in HTML, between tags or in an attribute."""
    return html.escape(printable(text))


def markdown_text(text: object) -> str:
    """A text in a paragraph, a heading or a table of Markdown: no mark-up, HTML or link comes of it."""
    return re.sub(r"[\\`*\[\]<>|&~#!$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", printable(text))


def markdown_code(text: object) -> str:
    """A text as code in a paragraph or a table of Markdown."""
    line = printable(text)
    marks = "`" * (_longest_run(line) + 1)
    blank = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{marks}{blank}{line}{blank}{marks}".replace("|", "\\|")


def markdown_block(text: object, language: str = "") -> str:
    """A text of several lines as a block of code."""
    lines = printable_lines(text)
    marks = "`" * max(_longest_run(lines) + 1, 3)
    return f"{marks}{language}\n{lines}\n{marks}"


def _longest_run(text: str) -> int:
    """The number of backticks in the longest run of them."""
    return max(map(len, re.findall("`+", text)), default=0)
