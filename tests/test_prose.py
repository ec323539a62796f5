"""The prose of the pages: short sentences, and standard terms in place of words of our own."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pages

DOCS = Path(__file__).resolve().parent.parent / "docs"
ELSEWHERE = {"all_pages"}  # a list of links
PAGES = sorted(page for page in DOCS.glob("*.md") if page.stem not in ELSEWHERE)
MOST_WORDS = 40

BANNED = {  # a word of our own: the standard one
    r"unbroken": "uninterrupted",
    r"whole (?:checkpoint|one)s?|(?:is|are) whole": "complete",
    r"to the bit|bit for bit": "bitwise identical",
    r"on paper": "estimated, in theory",
    r"(?:largest|other) instants?": "peak, phase",
    r"mend(?:s|ed)?": "fix",
    r"anew|afresh": "again",
    r"in the manner of": "like",
    r"as ever": "as usual",
    r"pass(?:ed|es)? over (?:by|rows|samples|data|the data)|(?:is|are|were) passed over": "skip",
    r"by hand": "manually, yourself",
    r"goes? on (?:from|with|by|in)|gone on with": "resume, continue",
    r"in silence": "without a message",
    r"nobody": "no process, you",
    r"foretold|foretells?": "predict",
    r"that which": "the noun",
}


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page, without code, tables, headings, and what scripts fill in."""
    text = re.sub(r"<!-- [\w :-]+ -->\n.*?<!-- end -->", "\n\n", text, flags=re.S)
    text = re.sub(r"^\s*```.*?^\s*```", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.S)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.M)
    text = re.sub(r"^(?:\||#).*$", "\n", text, flags=re.M)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a link counts by its text, code between backticks as one word."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`", "`code`", text)
    return re.split(r"(?<=[.!?:])[\"”)]?(?:\*\*)? (?=[A-Za-z`\"(*\[])", text)


def test_sentences_are_counted_without_code_tables_links_and_generated_text():
    page = (
        "# Title\n\nOne two. Three `a b c` [four](x.md#y z).\n\n| five |\n\n```\nsix\n```\n\n- seven\n  eight\n- nine\n"
    )
    page += "<!-- name -->\nten\n<!-- end -->\n<!-- Train 10: eleven -->\n"
    found = [len(sentence.split()) for part in prose(page) for sentence in sentences(part)]
    assert found == [2, 3, 2, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_sentence_of_a_page_is_longer_than_forty_words(page):
    found = [sentence for part in prose(page.read_text(encoding="utf-8")) for sentence in sentences(part)]
    assert [sentence for sentence in found if len(sentence.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_terms_of_the_field(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = " ".join(text.split())
    pattern = rf"\b(?:{'|'.join(BANNED)})\b"
    found = [text[max(0, match.start() - 40) : match.end() + 20] for match in re.finditer(pattern, text, re.I)]
    assert found == []
