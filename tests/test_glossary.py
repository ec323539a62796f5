"""docs/glossary.md: in the order of the alphabet, each word once, short, and with a page that treats it."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pages

PAGE = Path(__file__).resolve().parent.parent / "docs/glossary.md"
ENTRIES = dict(re.findall(r"^### (.+)\n\n((?:(?!^#).*\n?)+)", PAGE.read_text(encoding="utf-8"), re.M))
GROUPS = re.findall(r"^## (\w) to (\w)$", PAGE.read_text(encoding="utf-8"), re.M)


def test_the_words_are_in_the_order_of_the_alphabet_and_each_stands_once():
    words = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert words == sorted(set(words), key=str.lower)
    assert len(words) == len(ENTRIES) >= 60


def test_each_word_stands_below_the_heading_with_its_letter():
    first, last = "", ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"## (\w) to (\w)", line):
            first, last = match.groups()
        elif line.startswith("### "):
            assert first <= line[4].upper() <= last, line
    assert "".join(a + b for a, b in GROUPS) == "".join(sorted("".join(a + b for a, b in GROUPS)))


def test_each_entry_is_one_to_three_sentences_with_a_link():
    assert [word for word, text in ENTRIES.items() if len(re.findall(r"\.(?:\s|$)", text)) > 3] == []
    assert [word for word, text in ENTRIES.items() if not re.search(r"\]\(\w+\.md", text)] == []
