"""The lists of pages, made from the last line of each page: the index, and the navigation of the site.

    <!-- Watch 30: the gradient norm of every step, from before the clip -->

names the section in which the page stands, its place there, and what the index says of it. `fill.py page_lists` writes
the index, `build_site.py` takes the navigation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
INDEX = "all_pages"
SECTIONS = ("Start", "Train", "Watch", "Precision", "Shard", "Guard", "Save", "Commands", "Reference")
LAST_LINE = re.compile(r"\n<!-- (\w+) (\d+): (.+) -->\n*$")


@dataclass(frozen=True, order=True)
class Page:
    """One page of docs; pages are in the order of their section."""

    section: int
    place: int
    name: str
    title: str
    text: str

    @property
    def line(self) -> str:
        """Its line in the index."""
        return f"- [{self.title}]({self.name}.md): {self.text}."


def pages() -> list[Page]:
    """All pages but the home page, in the order of sections and places.

    Raises:
        ValueError: a page has no such last line, or two have one place.
    """
    found = []
    for path in sorted(DOCS.glob("*.md")):
        if path.stem == "README":
            continue
        text = path.read_text(encoding="utf-8")
        last = LAST_LINE.search(text)
        if last is None or last[1] not in SECTIONS:
            raise ValueError(f"docs/{path.name}: end it with <!-- SECTION PLACE: what it is about -->, {SECTIONS}")
        title = text.partition("\n")[0].removeprefix("# ")
        found.append(Page(SECTIONS.index(last[1]), int(last[2]), path.stem, title, last[3]))
    places = [(page.section, page.place) for page in found]
    if twice := [page.name for page in found if places.count((page.section, page.place)) > 1]:
        raise ValueError(f"docs: {', '.join(twice)}: two pages have one place")
    return sorted(found)


def in_sections() -> dict[str, list[Page]]:
    """The pages of each section."""
    every = pages()
    return {name: [page for page in every if page.section == number] for number, name in enumerate(SECTIONS)}


def index() -> dict[str, str]:
    """The lists of docs/all_pages.md, by the name of their place."""
    lines = {name: [page.line for page in found if page.name != INDEX] for name, found in in_sections().items()}
    parts = [f"## {name}\n\n" + "\n".join(found) for name, found in lines.items()]
    return {"pages": "\n" + "\n\n".join(parts) + "\n"}


def navigation() -> list[Mapping[str, list[str | dict[str, str]]]]:
    """The navigation of the site."""
    names = {name: [f"{page.name}.md" for page in found] for name, found in in_sections().items()}
    return [{"Start": [{"Home": "README.md"}, *names.pop("Start")]}, *({name: found} for name, found in names.items())]
