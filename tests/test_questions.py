"""What newcomers ask: docs/questions.md leads to a section that has the answer, two clicks from docs/README.md at most.

A row is a question, its answer in short, and a link. Whatever stands in backticks in the short answer has to stand in
the section of the link too: a link to a section that no longer answers is found. So does a page that nobody reaches.
"""

import posixpath
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_docs import anchors

pytestmark = pytest.mark.pages

DOCS = Path(__file__).resolve().parent.parent / "docs"
HOME, QUESTIONS = "README.md", "questions.md"
ROW = re.compile(
    r"^\| (?P<question>[^|]+[.?]) \| (?P<short>[^|]+) \| \[[^\]]+\]\((?P<page>\w+\.md)#(?P<anchor>[\w-]+)\) \|$"
)


class Row(NamedTuple):
    """A question and where it is answered."""

    question: str
    words: list[str]
    page: str
    anchor: str


def rows(text: str) -> list[Row]:
    """The questions of the page; a row of a table that is no question is an error."""
    found = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith(("| question |", "|---")):
            match = ROW.match(line)
            assert match, f"not | question | in short | [page](page.md#anchor) |: {line}"
            words = re.findall(r"`([^`]+)`", match["short"])
            found.append(Row(match["question"], words, match["page"], match["anchor"]))
    return found


def section(page: Path, anchor: str) -> str:
    """The text below a heading, up to the next one of its level or above; headings in code blocks are none."""
    lines, inside, level, kept = page.read_text(encoding="utf-8").splitlines(), False, 0, []
    for line in lines:
        inside ^= line.startswith("```")
        heading = None if inside else re.match(r"(#+) (.+)$", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and not level:
            slug = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
            level = len(heading[1]) if slug == anchor else 0
        if level:
            kept.append(line)
    return "\n".join(kept)


def clicks(without: str = "") -> dict[str, int]:
    """Links to follow from the home page to each page, the fewest; pages beside docs/ are not followed."""
    found, waiting = {HOME: 0}, [HOME]
    for page in waiting:
        text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)\s]*)?\)", text):
            target = posixpath.normpath(link)
            if "/" not in target and target not in found and target != without and (DOCS / target).is_file():
                found[target] = found[page] + 1
                waiting.append(target)
    return found


def unanswered(row: Row) -> str | None:
    """Why a question is not answered where its row leads."""
    page = DOCS / row.page
    if not page.is_file():
        return f"{row.page} is not there"
    if row.anchor not in anchors(page):
        return f"{row.page} has no heading #{row.anchor}"
    answer = section(page, row.anchor)
    missing = [word for word in row.words if word not in answer]
    return f"{row.page}#{row.anchor} does not say {', '.join(missing)}" if missing or not row.words else None


TABLE = rows((DOCS / QUESTIONS).read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.question)
def test_the_section_that_a_question_leads_to_has_the_words_of_its_answer(row):
    assert unanswered(row) is None


def test_each_answer_is_two_clicks_away_for_a_reader_who_does_not_open_the_questions():
    known = clicks(without=QUESTIONS)
    assert [row.question for row in TABLE if known.get(row.page, 99) > 2] == []


def test_every_page_is_two_clicks_from_the_home_page():
    known = clicks()
    assert sorted(path.name for path in DOCS.glob("*.md") if known.get(path.name, 99) > 2) == []


def test_the_table_asks_nothing_twice():
    questions = [row.question for row in TABLE]
    assert len(set(questions)) == len(questions) >= 20
