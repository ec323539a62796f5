"""Text as wide as the terminal."""

import os

import pytest

from lightning_tricks._core.terminal import terminal_columns, wrapped


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
