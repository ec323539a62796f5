"""The pages: their code runs, their links lead somewhere, and pages of one kind have one form.

Python blocks run as they stand, recipe commands run up to the built model.
"""

import re
import shlex
from pathlib import Path

import pytest
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures
from markdown_it import MarkdownIt

import lightning_tricks
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import COMMANDS, recipes_folder

pytestmark = pytest.mark.pages

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs/README.md"
GUIDES = {
    "all_pages", "checkpoints", "command_line", "compatibility", "data", "existing_projects", "export", "glossary",
    "installing", "language_model", "launching", "layer_statistics", "limits", "monitors", "parameter_roles",
    "playbook", "precision", "questions", "quickstart", "race", "recipes", "resume_with_changes", "speed", "strategies",
    "versions", "what_survives", "which_optimizer",
}  # fmt: skip
DOCS = sorted(page for page in ROOT.glob("docs/*.md") if page != INDEX)
CARDS = [page for page in DOCS if page.stem not in GUIDES]
AGENTS = ROOT / "AGENTS.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", AGENTS, ROOT / "benchmarks/README.md", INDEX, *DOCS]

CARD = (  # the headings of a card in their order, and whether it needs them
    ("Use", True),
    ("When to use it", False),
    ("What it records", False),
    ("How it works", False),
    ("Defaults and why", True),
    ("What to watch", False),
    ("Cost", True),
    ("Does not combine with", True),
    ("Source", True),
)
ORDER = [heading for heading, _ in CARD]
CLOSING = ORDER[ORDER.index("Defaults and why") :]  # with which a guide may end


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    pattern = rf"^```({'|'.join(languages)})\n(.*?)^```"
    return [match[2] for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.M | re.S)]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(page: Path, level: int = 2) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", prose(page), re.M)


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.canary if p.stem == "quickstart" else ()) for p in PAGES if blocks(p, "python")],
    ids=name_of,
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def recipe_arguments(page: Path) -> set[tuple[str, ...]]:
    """What the page's commands give to a recipe, without checkpoints and files, which nobody has here."""
    text = "\n".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ")
    found = re.findall(r"(?:python|-m) ?-?m? ?lightning_tricks (?:fit|validate|test|predict|prepare) ([^\n&|#]*)", text)
    return {tuple(shlex.split(re.sub(r"--(?:ckpt_path|data.tokenizer|text|output) \S+", "", line))) for line in found}


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
@pytest.mark.parametrize("arguments", sorted(set().union(*map(recipe_arguments, PAGES))), ids=" ".join)
def test_recipe_commands_build(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    model, data, _ = load_recipe(*arguments)
    assert model is not None
    assert data is not None


def test_every_recipe_named_in_the_docs_exists():
    for page in PAGES:
        for name in re.findall(r"recipes/([\w/]+\.yaml)", page.read_text(encoding="utf-8")):
            assert (recipes_folder() / name).is_file(), f"{page.name}: recipes/{name}"


@pytest.mark.parametrize("card", CARDS, ids=name_of)
def test_a_card_has_the_headings_of_a_card_in_their_order(card):
    found = headings(card)
    assert [heading for heading in found if heading not in ORDER] == []
    assert [heading for heading, needed in CARD if needed and heading not in found] == []
    assert found == sorted(set(found), key=ORDER.index)


@pytest.mark.parametrize("guide", sorted(GUIDES))
def test_a_guide_has_tasks_and_then_the_closing_headings_of_a_card(guide):
    found = headings(ROOT / f"docs/{guide}.md")
    tasks = [heading for heading in found if heading not in ORDER]
    closing = found[len(tasks) :]
    assert len(tasks) >= 2
    assert found[: len(tasks)] == tasks
    assert closing == [heading for heading in CLOSING if heading in closing]


@pytest.mark.parametrize("page", [INDEX, *DOCS], ids=name_of)
def test_a_page_begins_with_its_title_and_a_sentence_that_says_what_one_gets(page):
    title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert re.fullmatch(r"# [^\n]+", title)
    assert len(headings(page, level=1)) == 1
    assert re.match(r"[\w`]", first), first  # no bold label, table or list
    assert first.endswith(".")
    assert len(first) < 500


@pytest.mark.parametrize("page", CARDS, ids=name_of)
def test_no_section_of_a_card_is_empty(page):
    sections = re.split(r"^## .+$", page.read_text(encoding="utf-8"), flags=re.M)[1:]
    assert all(section.strip() for section in sections)


def test_every_public_name_stands_in_the_docs():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS)
    names = set(lightning_tricks.__all__) - {"__version__"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose(page))
    local = [link for link in ("".join(pair) for pair in links) if "://" not in link]
    assert [link for link in local if broken(page, link)] == []


def test_the_readme_is_short_and_shows_before_it_tells():
    """Words and links of what a code host renders: headings, text, tables and badges, without blocks of code."""
    html = MarkdownIt("commonmark").enable("table").render((ROOT / "README.md").read_text(encoding="utf-8"))
    text = re.sub(r"<pre.*?</pre>|<!--.*?-->", "", html, flags=re.S)
    badges = re.findall(r'alt="([^"]+)"[^>]*>', text)
    words = " ".join([*badges, re.sub(r"<[^>]*>", " ", text)]).split()
    assert len(words) <= 700
    assert len(re.findall(r"<a ", text)) <= 30
    order = ["<picture>", "<table>", "callbacks=watch", "fit --config", "pytest -n 2", "compare.png"]
    assert [place for place in sorted(order, key=html.index) if html.count(place)] == order
    below = html.partition("<h2>What it does</h2>")[2].partition("<h2>")[0]
    assert len(re.findall(r"<h3>", below)) == 5
    assert max(p.count("\n") for p in re.findall(r"<p>.*?</p>", below, re.S)) < 5


def test_each_picture_of_the_front_pages_has_a_light_and_a_dark_form():
    for page in (ROOT / "README.md", INDEX, ROOT / "docs/quickstart.md", ROOT / "docs/speed.md"):
        text = page.read_text(encoding="utf-8")
        pictures = re.findall(r'<source media="[^"]*dark\)" srcset="([^"]+)">\s*<img[^>]* src="([^"]+)"', text)
        assert len(pictures) == len(re.findall(r"<img |!\[[^]]*\]\((?!http)", text)) > 0
        for dark, light in pictures:
            assert dark == re.sub(r"(\.\w+)$", r"_dark\1", light)
            assert (page.parent / dark).is_file()


def test_the_page_for_agents_is_short_and_names_files_and_commands_that_exist():
    text = AGENTS.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    paths = re.findall(r"`((?:lightning_tricks|docs|benchmarks|tests|recipes)/[\w/.]*|pyproject\.toml)`", text)
    paths += re.findall(r" ((?:recipes|tests)/[\w/.]+)", "".join(blocks(AGENTS, "bash")))
    assert len(paths) >= 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    commands = re.findall(r"-m lightning_tricks ([a-z][\w-]*)", text)
    assert commands
    assert set(commands) <= COMMANDS.keys()


def test_each_row_of_the_page_on_faults_names_what_is_lost_and_a_test_that_exists():
    page = (ROOT / "docs/what_survives.md").read_text("utf-8")
    tests = dict(re.findall(r"^(\d+)\. `(.+)`$", page, re.M))
    lines = re.findall(r"^\| (?!fault |change )(.+) \|$", page, re.M)
    assert len(lines) >= 20
    rows = [re.fullmatch(r"(.+?) +\| (.+?) +\| \[(\d+)\]\(#tests\)", line).groups() for line in lines]
    assert {number for _, _, number in rows} == set(tests)
    for number, name in tests.items():
        file, test = name.split("::")
        (path,) = (ROOT / "tests").rglob(file)
        assert re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.M), number


# ---- docs/glossary.md: in the order of the alphabet, each word once, short, and with a page that treats it

GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (.+)\n\n((?:(?!^#).*\n?)+)", GLOSSARY, re.M))


def test_the_words_are_in_the_order_of_the_alphabet_and_each_stands_once():
    words = re.findall(r"^### (.+)$", GLOSSARY, re.M)
    assert words == sorted(set(words), key=str.lower)
    assert len(words) == len(ENTRIES) >= 60


def test_each_entry_is_one_to_three_sentences_with_a_link():
    assert [word for word, text in ENTRIES.items() if len(re.findall(r"\.(?:\s|$)", text)) > 3] == []
    assert [word for word, text in ENTRIES.items() if not re.search(r"\]\(\w+\.md", text)] == []
