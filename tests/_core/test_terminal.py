"""Text as wide as the terminal, and its colours."""

import os
from types import SimpleNamespace

import pytest

from lightning_tricks._core.terminal import colored, shows_color, terminal_columns, width, wrapped
from lightning_tricks.logs.table import lines_of


@pytest.mark.parametrize(("columns", "found"), [("80", 80), ("7", 40), (None, 99)])
def test_the_columns_are_those_of_the_terminal_or_the_given_ones(monkeypatch, columns, found):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert terminal_columns(99) == found


def test_long_lines_hang_below_their_text_and_no_word_is_broken():
    text = "key  one two-three 20,480 a_word_that_is_long\nkey  two\n\n  three"
    assert wrapped(text, 16, 5) == (
        "key  one\n     two-three\n     20,480\n     a_word_that_is_long\nkey  two\n\n  three"
    )
    assert wrapped(text, 45, 5) == text


@pytest.mark.parametrize(
    ("is_terminal", "variables", "shows"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # no-color.org: when it is not empty
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": ""}, False),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_for_terminals_unless_the_user_says_otherwise(monkeypatch, is_terminal, variables, shows):
    for name, value in {"NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    stream = SimpleNamespace(isatty=lambda: is_terminal)
    assert shows_color(stream) == shows
    assert colored("six", "red", stream) == ("\x1b[31msix\x1b[0m" if shows else "six")
    assert colored("six", None, stream) == "six"


def test_colours_take_no_columns_and_wide_characters_two(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    red = colored("two words", "red")
    assert [width(text) for text in (red, "模型", "é", "e\u0301", "✓ ok")] == [9, 4, 1, 1, 4]
    assert wrapped(f"{red} of 模型", 12, 1) == f"{red} of\n 模型"  # 17 columns; 28 characters
    assert wrapped(f"{red} of 模型", 17, 1) == f"{red} of 模型"
    rows = lines_of([["模型", "a"], ["x", "bcd"]], style=lambda row, column: "bold" if column else None)
    assert rows == ["模型    \x1b[1ma\x1b[0m", "x     \x1b[1mbcd\x1b[0m"]
