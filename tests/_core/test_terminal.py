"""Text as wide as the terminal."""

import os

import pytest

from lightning_tricks._core.terminal import hanging, terminal_columns


@pytest.mark.parametrize(("columns", "found"), [("80", 80), ("7", 40), (None, 99)])
def test_the_columns_are_those_of_the_terminal_or_the_given_ones(monkeypatch, columns, found):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert terminal_columns(99) == found


def test_later_lines_hang_below_the_text_and_no_word_is_broken():
    assert hanging("key  ", "one two-three 20,480 a_word_that_is_long", 16) == (
        "key  one\n     two-three\n     20,480\n     a_word_that_is_long"
    )
    assert hanging("key: ", "one two", 9, 2) == "key: one\n  two"
