"""The site of the docs: it builds strictly, all of its links lead somewhere, and every public name is found there."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lightning_tricks

pytest.importorskip("zensical", reason="the site needs the extra docs")
import api_pages
import build_site
import page_lists
import test_questions
from markdown_it import MarkdownIt

pytestmark = pytest.mark.pages

ROOT = Path(__file__).resolve().parent.parent
NAV = page_lists.navigation()
NAMES = [name for name in lightning_tricks.__all__ if name != "__version__"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a fresh build."""
    folder = tmp_path_factory.mktemp("site")
    assert build_site.build(folder) == []  # a strict build: no warning either
    return folder


@pytest.fixture(scope="module")
def entries():
    """The entries of the API reference by name."""
    return {entry.name: entry for entry in build_site.reference().all()}


# ---- navigation


def test_each_page_of_the_docs_stands_once_in_the_navigation():
    listed = list(build_site.pages_of(NAV))
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("docs/*.md"))
    assert listed[0] == "README.md"  # the home page


# ---- links


class Page(HTMLParser):
    """The anchors, links and files of a page of the site, and the text of its tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.files, self.tags = set(), [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("img", "script", "link", "source"):
            found = given.get("src") or given.get("href") or given.get("srcset")
            self.files += [found] if found and given.get("rel") != "canonical" else []


def pages_in(html: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in html.rglob("*.html")}


@pytest.fixture(scope="module")
def parsed(out):
    """The pages of the site by their files."""
    return pages_in(out / "html")


def broken_links(html: Path, pages: dict[Path, Page]) -> list[str]:
    """Each link, anchor, image, style and script that is not there."""
    found = []
    for path, page in pages.items():
        for link in page.links + page.files:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            start = html if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file():
                found.append(f"{path.relative_to(html)}: {link} is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("only-"):
                found.append(f"{path.relative_to(html)}: {link} has no such anchor")
    return found


def test_all_links_anchors_and_images_lead_somewhere(out, parsed):
    assert broken_links(out / "html", parsed) == []


def test_no_page_loads_anything_from_another_host(parsed):
    loaded = {file for page in parsed.values() for file in page.files}
    assert [file for file in sorted(loaded) if urlsplit(file).netloc] == []


# ---- pages


def counts(html: str) -> dict[str, int]:
    """How many lists, tables and so on are in a text; a block of code has line numbers and spans of its own."""
    html = re.sub(r"<pre.*?</pre>", "<pre>", html, flags=re.S)
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in ("h2", "h3", "ul", "ol", "li", "table", "tr", "pre")}


def test_each_page_has_the_lists_tables_and_code_that_a_code_host_shows(out):
    host, other, rows = MarkdownIt("commonmark").enable(["table"]), {}, []
    for name in [path.stem for path in sorted(ROOT.glob("docs/*.md"))]:
        expected = counts(host.render((out / f"docs/{name}.md").read_text(encoding="utf-8")))
        folder = out / "html" if name == "README" else out / "html" / name
        page = (folder / "index.html").read_text(encoding="utf-8")
        article = page.partition("<article")[2].partition("</article>")[0]
        if counts(article) != expected:
            other[name] = (counts(article), expected)
        if re.search(r"<p>\|", article):
            rows.append(name)
    assert other == {}
    assert rows == []  # a row of a table that stands outside of it


def test_prose_in_an_output_with_columns_is_filled_and_its_tables_and_commands_are_not():
    words = "word " * 30
    filled = build_site.filled(f"data       {words}").splitlines()
    assert max(map(len, filled)) <= build_site.WIDTH
    assert {line[:11] for line in filled[1:]} == {" " * 11}
    for line in (f"a  b  {words}", f"{words} --option", "short"):
        assert build_site.filled(line) == line
    assert build_site.as_output(build_site.TEXT.search("```text\none\n```\n")) == "```output\none\n```"


# ---- the API


def lacking(name: str, entries, cards, tests) -> list[str]:
    """What a public name has not: a page in docs, a test, an entry in the API reference."""
    entry = entries.get(name)
    has = {
        "a page": entry is not None and entry.card in cards and bool(word(name).search(cards[entry.card])),
        "a test": any(word(name).search(text) for text in tests),
        "an entry in the API reference": entry is not None and bool(entry.summary),
    }
    return [thing for thing, there in has.items() if not there]


def test_each_public_name_has_a_page_a_test_and_an_entry_in_the_api_reference(entries):
    general = {"test_site.py", "test_site_browser.py", "test_package.py", "test_docs.py"}  # which look at all names
    cards = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")}
    tests = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py") if path.name not in general]
    assert {name: found for name in NAMES if (found := lacking(name, entries, cards, tests))} == {}


def test_what_is_public_in_the_packages_has_an_entry_too(entries):
    packages = ("callbacks", "checkpoints", "data", "loggers", "metrics", "mixins", "optim", "precision", "schedules")
    for package in packages:
        module = __import__(f"lightning_tricks.{package}", fromlist=["x"])
        public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0].isupper()]
        assert [name for name in public if name not in entries] == [], package


def word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(name)}\b")


def describes(name: str, text: str, card: str) -> bool:
    """Whether a page has a name in its title, before its first section, in a heading, a table, or code that uses it.

    A row of a table that leads to the card is none of these.
    """
    lines = [line for line in text.splitlines() if line.startswith(("#", "|")) or re.search("import|class_path", line)]
    lines = [line for line in lines if f"({card}.md" not in line]
    return bool(word(name).search("\n".join([text.partition("\n## ")[0], *lines])))


def test_the_card_of_each_class_describes_it(entries):
    cards = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md") if path.stem != "README"}
    other = {}
    for entry in entries.values():
        name, card = entry.name, entry.card
        titled = [page for page, text in cards.items() if word(name).search(build_site.title(text))]
        if titled and card not in titled:
            other[name] = (card, titled)
        elif card is not None and not describes(name, cards[card], card):
            better = [page for page in cards.keys() - {card} if describes(name, cards[page], card)]
            if (better and name not in api_pages._CARDS) or not word(name).search(cards[card]):
                other[name] = (card, better)
    assert other == {}


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("ActivationMonitor", "monitors"),  # whose page has no section Use
        ("MemoryMonitor", "monitors"),
        ("UpdateMonitor", "monitors"),
        ("LRMonitor", "monitors"),
        ("StepGuard", "step_guard"),
        ("TailAverage", "averages"),
        ("RankMonitor", "hang_watchdog"),
        ("OptimizerMixin", "decay_groups"),
        ("Llama", "decoder"),
        ("TextData", "data"),
    ],
)
def test_a_class_is_described_where_a_reader_would_look(name, card, entries):
    assert entries[name].card == card


def test_each_card_that_is_given_by_hand_is_one_of_a_public_name(entries):
    assert [name for name in api_pages._CARDS if name not in entries] == []


def test_each_class_has_a_page_of_its_own_and_stands_in_the_list_of_its_package(out, entries):
    pages = [entry.page for entry in entries.values() if entry.thing.is_class]
    assert len({page.lower() for page in pages}) == len(pages) > 80  # on file systems that know no case, too
    for entry in entries.values():
        listed = (out / f"docs/reference/{entry.package}/README.md").read_text(encoding="utf-8")
        link = entry.link.removeprefix(f"{entry.package}/")
        assert f"- [`{entry.name}`]({link}){{: #{entry.name} }}: {api_pages._escape(entry.summary)}\n" in listed


def test_a_link_to_an_entry_of_the_page_of_a_package_still_leads_to_its_name(parsed, out, entries):
    for entry in entries.values():
        assert entry.name in parsed[out / f"html/reference/{entry.package}/index.html"].anchors


def test_an_entry_documents_every_argument(entries):
    missing = []
    for thing in (entries[name].thing for name in NAMES):
        for one in api_pages._parameters(thing):
            if one.kind.name not in ("var_positional", "var_keyword"):
                missing += [] if re.search(rf"\b{one.name}\b", thing.docstring.value) else [(thing.path, one.name)]
    assert missing == []


def test_an_entry_has_signature_arguments_errors_source_and_a_link_to_its_page(out):
    entry = (out / "docs/reference/callbacks/EMA.md").read_text(encoding="utf-8")
    assert entry.startswith("# EMA\n\nKeeps an exponential moving average of the weights")  # before a long signature
    options = ("decay: float = 0.999", "warmup: bool = True", "validate: bool = True", "blend: float = 1.0")
    signature = "EMA(\n" + "".join(f"    {option},\n" for option in options) + ")"
    assert f"from lightning_tricks import EMA\n\n{signature}" in entry
    assert "| `decay` | `float` | `0.999` | share of the average that stays at each step." in entry
    assert "`](../../repository/lightning_tricks/_core/errors.py.md): an option out of range;" in entry
    assert "**Source:** Polyak and Juditsky 1992, https://doi.org/10.1137/0330046;" in entry
    assert "**Guide:** [Averages of the weights: EMA and TailAverage](../../averages.md)\n" in entry
    assert "[Source](../../repository/lightning_tricks/guards/averages.py.md)" in entry
    assert "[`FSDP2Strategy`](../strategies/FSDP2Strategy.md)" in entry  # names lead to their entries
    card = (out / "docs/averages.md").read_text(encoding="utf-8")
    assert "\n## API\n\n- [`EMA`](reference/callbacks/EMA.md): Keeps an exponential moving average" in card


def test_an_entry_spells_out_types_links_private_names_and_leaves_out_hooks(out):
    entry = (out / "docs/reference/data/TextData.md").read_text(encoding="utf-8")
    assert "    packing: Literal['cut', 'best_fit'] = 'cut'," in entry
    assert "| `packing` | `Literal['cut', 'best_fit']` | `'cut'` |" in entry
    assert "- [`UsageError`](../../repository/lightning_tricks/_core/errors.py.md): bad options" in entry
    assert "## held_out {: #TextData.held_out }" in entry  # short in the list of the page
    assert [name for name in api_pages._HOOKS if f"## {name} " in entry] == []


def test_the_page_of_an_unknown_address_has_the_search_and_three_links_that_lead_somewhere(out):
    page = (out / "html/404.html").read_text(encoding="utf-8")
    said = page.partition("<h1>This page does not exist</h1>")[2].partition("</p>")[0]
    links = re.findall(r'href="/([^"]+)"', said)
    assert len(links) == 3
    assert all((out / "html" / link / "index.html").is_file() for link in links)
    assert 'data-md-component="search"' in page


# ---- search and llms.txt


def test_the_search_index_has_each_public_name_with_its_entry(out, entries):
    items = json.loads((out / "html/search.json").read_text(encoding="utf-8"))["items"]
    titles = {(item["title"], item["location"]) for item in items}
    wanted = {(name, f"reference/{entry.link.replace('.md', '/')}") for name, entry in entries.items()}
    assert sorted(wanted - titles) == []


def test_each_question_stands_in_the_search_index_and_leads_to_its_row(out, parsed):
    items = json.loads((out / "html/search.json").read_text(encoding="utf-8"))["items"]
    asked = {
        item["title"]: item["location"] for item in items if item["location"].startswith("questions/#") and item["text"]
    }
    assert list(asked) == [row.question.rstrip(".") for row in test_questions.TABLE]
    anchors = parsed[out / "html/questions/index.html"].anchors
    assert [question for question, location in asked.items() if location.partition("#")[2] not in anchors] == []
    assert len(set(asked.values())) == len(asked)


def test_the_search_knows_the_files_of_the_repository_by_their_titles_alone(out):
    items = json.loads((out / "html/search.json").read_text(encoding="utf-8"))["items"]
    assert {item["text"] for item in items if item["location"].startswith("repository/")} == {""}


def test_llms_txt_has_the_published_form_and_its_links_lead_to_markdown(out):
    lines = (out / "html/llms.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# lightning_tricks"
    assert lines[2].startswith("> PyTorch Lightning")
    headings = [line.removeprefix("## ") for line in lines if line.startswith("#")][1:]
    assert headings == [*(name for one in NAV for name in one), "API", "Optional"]
    average = "- [EMA](reference/callbacks/EMA/index.html.md): Keeps an exponential moving average of the weights"
    assert any(line.startswith(average) for line in lines)
    assert not [line for line in lines if "```" in line]
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .+$", "\n".join(lines), re.M)
    assert len(links) == sum(line.startswith("- ") for line in lines)
    for link in links:
        assert (out / "html" / link).read_text(encoding="utf-8").startswith("# ")
    listed = {link.removesuffix("/index.html.md") for link in links}
    assert {path.stem for path in ROOT.glob("docs/*.md")} - {"README"} <= listed
    full = (out / "html/llms-full.txt").read_text(encoding="utf-8")
    assert all(f"\n# {build_site.title(path.read_text('utf-8'))}\n" in full for path in ROOT.glob("docs/*.md"))
