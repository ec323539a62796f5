"""Build the site of the docs: its pages, the API reference, the files that pages link to, and llms.txt.

    python docs/scripts/build_site.py                        # into build/site/html
    python docs/scripts/build_site.py --url https://...      # where it will be served: for sitemap and canonical links
    python -m http.server -d build/site/html                 # look at it

Needs the extra `docs`. `mkdocs.yml` has the settings, `page_lists.py` makes the navigation. The build is strict: a
warning of Zensical fails it.
The pages are those of docs/ as they stand, but for four things: a link out of docs/ leads to a copy of its file below
`repository/`, a picture with a light and a dark form follows the site's switch, a page ends with links to the API of
its names, and each row of `questions.md` has an anchor, to which the search leads.
"""

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

SCRIPTS = Path(__file__).resolve().parent
DOCS, ROOT = SCRIPTS.parents[0], SCRIPTS.parents[1]
OUT = ROOT / "build/site"
# The project's files in the navigation.
PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "tests/README.md")
sys.path[:0] = [str(SCRIPTS)]
try:
    import page_lists
    from api_pages import Entry, Reference, navigation, pages, read_reference
except ImportError as error:  # griffe's
    sys.exit(f"{error.name} is missing: pip install -c constraints.txt '.[docs]'")

AS_CODE = dict.fromkeys((".yaml", ".yml", ".cff"), "yaml") | dict.fromkeys((".py", ".pyi"), "python")
AS_CODE |= {".toml": "toml", ".sh": "bash"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))|((?:src|href)=\")([^\"]+)(\")")
PICTURE = re.compile(
    r'<picture>\s*<source media="[^"]*dark[^"]*" srcset="([^"]+)">'
    r'\s*<img alt="([^"]*)" src="([^"]+)"(?: width="\d+")?>\s*</picture>'
)
BADGE = re.compile(r"!\[([^\]]*)\]\(https?://[^)]*\)")  # a picture of another host; its text takes its place
BY_THEME = r"![\2](\3#only-light)![\2](\1#only-dark)"  # how the theme wants a picture with two forms
QUESTION = re.compile(r"^\| (?!question \|)([^|-][^|]*?) \| ([^|]+) \| ([^|]+) \|$", re.M)  # a row of questions.md
# Words that the search leaves out, as it finds only what has every word of a query.
STOP_WORDS = (
    "a an the of to in on at by for from with is are was be it its this that there my your i me we you do does did "
    "how what which when where why who can could should will would and or has have if as so"
)
GAP = re.compile(r"\S {3,}\S")  # between two columns of an output
WIDTH = 88  # to which prose in an output is filled
TEXT = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*~*$", re.M | re.S)


def stage(out: Path) -> None:
    """Write what Zensical builds from: `docs/` and `mkdocs.yml`."""
    staged, cards = out / "docs", read_cards()
    titles = {name: title(text) for name, text in cards.items()}
    for folder in ("images", "assets"):
        shutil.copytree(DOCS / folder, staged / folder)
    api: dict[str, list[str]] = {}
    for entry in reference().all():
        if entry.card is not None:
            line = f"- [`{entry.name}`](reference/{entry.link}): {entry.summary}"
            api.setdefault(entry.card, []).append(line)
    for name, text in cards.items():
        lines = api.get(name)
        text += "\n## API\n\n" + "\n".join(lines) + "\n" if lines else ""
        if name == "questions":
            text = QUESTION.sub(lambda row: row[0].replace(row[1], f'<a id="{slug(row[1])}"></a>{row[1]}', 1), text)
        write(staged / f"{name}.md", PICTURE.sub(BY_THEME, TEXT.sub(as_output, text)))
    for name, text in pages(reference(), titles).items():
        write(staged / "reference" / name, text)
    copy_linked(staged, (staged / "reference").rglob("*.md"))
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"docs_dir": "docs", "site_dir": "html", "nav": page_lists.navigation()}
    others = [f"repository/{path}" for path in PROJECT if path != "README.md"]
    section(settings["nav"], "Reference")[:0] = [{"API": navigation(reference())}]
    section(settings["nav"], "Reference").append({"Project": [{"README": "repository/README.md"}, *others]})
    (out / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_cards() -> dict[str, str]:
    """The text of each page in docs, by its name without ending."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


@functools.cache
def reference() -> Reference:
    """What is public, read once in this process."""
    lists = ("README", page_lists.INDEX)  # which name much and describe nothing
    return read_reference(ROOT, {name: text for name, text in read_cards().items() if name not in lists})


def copy_linked(staged: Path, entries: Iterable[Path]) -> None:
    """Copy the project's files, and all to which pages in docs, `entries` and they link, below `repository/`."""
    waiting = [ROOT / path for path in PROJECT]
    for entry in entries:
        waiting += [ROOT / path for path in re.findall(r"\(../../repository/([^)]+)\.md\)", entry.read_text("utf-8"))]
    done: set[Path] = set()

    def place(page: PurePosixPath, source: Path) -> Callable[[str], str]:
        """How the links of a staged page, whose text stands at `source`, are to be written."""

        def moved(link: str) -> str:
            path, hash_, anchor = link.partition("#")
            if not path or "://" in link or link.startswith("mailto:"):
                return link
            target = (source.parent / path).resolve()
            if not target.exists() or (target.is_relative_to(DOCS) and source.is_relative_to(DOCS)):
                return link  # which the build or the tests find where it is broken
            if target.is_relative_to(DOCS) and target.suffix in (".md", ".svg", ".png"):
                there = PurePosixPath(target.relative_to(DOCS).as_posix())
            else:
                waiting.append(target)
                there = place_of(target)
            return os.path.relpath(there, page.parent) + hash_ + anchor

        return moved

    for path in sorted(DOCS.glob("*.md")):
        page = staged / path.name
        write(page, relinked(page.read_text(encoding="utf-8"), place(PurePosixPath(path.name), path)))
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        page = place_of(path)
        target = staged / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            write(target, relinked(listing(path), place(page, path / "README.md")))
        elif path.suffix == ".md":
            text = PICTURE.sub(BY_THEME, BADGE.sub(r"`\1`", path.read_text(encoding="utf-8")))
            write(target, relinked(text, place(page, path)))
        elif page.suffix == ".md":
            write(target, code_page(path))
        else:
            shutil.copyfile(path, target)


def place_of(path: Path) -> PurePosixPath:
    """Where a file of the checkout stands in the site: Markdown and code as a page, all else as a file."""
    name = PurePosixPath("repository", path.relative_to(ROOT).as_posix())
    if path.is_dir():
        return name / "README.md"
    return name.with_name(f"{name.name}.md") if path.suffix in AS_CODE else name


def listing(folder: Path) -> str:
    """A page for a folder: its README, else its files."""
    if (folder / "README.md").is_file():
        return (folder / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith((".", "_"))]
    lines = [f"# {folder.relative_to(ROOT).as_posix()}", "", *(f"- [{name}]({name})" for name in names)]
    return "\n".join(lines) + "\n"


def code_page(path: Path) -> str:
    """A page that shows a file."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    return f"# {name}\n\n``````{AS_CODE[path.suffix]}\n{text.rstrip()}\n``````\n"


def relinked(text: str, moved: Callable[[str], str]) -> str:
    """Markdown whose links, outside code, are what `moved` makes of them."""

    def replaced(match: re.Match[str]) -> str:
        before, link, after = match.groups()[:3] if match[2] else match.groups()[3:]
        return f"{before}{moved(link)}{after}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(replaced, text[end:])])


def section(nav: list[dict[str, Any]], name: str) -> list[Any]:
    """The entries of a section of the navigation."""
    return next(entry[name] for entry in nav if name in entry)


def pages_of(nav: Sequence[Any]) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def parts(nav: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """The sections of a navigation with their pages; what is in a section below one stands for itself."""
    for section_ in nav:
        ((name, entries),) = section_.items()
        named = [next(iter(entry.values())) if isinstance(entry, dict) else entry for entry in entries]
        yield name, [entry for entry in named if isinstance(entry, str)]
        for below in entries:
            ((inner, pages_),) = below.items() if isinstance(below, dict) else [("", "")]
            if not isinstance(pages_, str):
                # what a reader in a hurry leaves out, by llmstxt.org
                yield "Optional" if inner == "Project" else inner, list(pages_of(pages_))


def title(text: str) -> str:
    """The title of a page."""
    return text.partition("\n")[0].removeprefix("# ")


def slug(text: str) -> str:
    """The words of a text as an anchor."""
    return "-".join(re.findall(r"\w+", text.lower()))


def search_index(html: Path) -> None:
    """Make the search find questions first, files of the repository by their titles alone, and no stop words.

    The more words stand in the title of an item, the higher it ranks; text counts less, and equals keep their order.
    """
    file = html / "search.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    page = next(item for item in index["items"] if item["location"] == "questions/")
    asked = []
    for row in QUESTION.finditer((DOCS / "questions.md").read_text(encoding="utf-8")):
        said = re.sub(r"`([^`]+)`", r"<code>\1</code>", f"{plain(row[3])}: {row[2]}")
        item = {
            "location": f"questions/#{slug(row[1])}",
            "level": 2,
            "title": row[1].rstrip("."),
            "text": f"<p>{said}</p>",
            "path": ["Questions", plain(row[3])],
        }
        asked.append(page | item)
    for item in index["items"]:
        if item["location"].startswith(("repository/", "questions/#")):  # whose rows are items now
            item["text"] = ""
    index["items"] = asked + index["items"]
    index["config"]["separator"] += rf"|[?;']+|{stop_words()}"
    file.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def not_found(html: Path) -> None:
    """Say on the page of an unknown address where to go: its search stands above, as on each page."""
    file = html / "404.html"
    text = file.read_text(encoding="utf-8")
    base = re.search(r'href="([^"]*)"[^>]* class="md-header__button md-logo"', text)[1]  # type: ignore[index]
    links = {"quickstart/": "Quickstart", "questions/": "Questions", "all_pages/": "All pages"}
    ways = " · ".join(f'<a href="{base}{link}">{name}</a>' for link, name in links.items())
    said = f"<h1>This page does not exist</h1><p>Search for it above, or begin here: {ways}</p>"
    file.write_text(re.sub(r"<h1>404.*?</h1>", said, text), encoding="utf-8")


def stop_words() -> str:
    """A pattern of JavaScript for stop words between words: a separator, both in a text and in a query.

    The last word of a query is none, as it may be the beginning of another one.
    """
    words = "|".join(f"[{word[0].upper()}{word[0]}]{word[1:]}" for word in STOP_WORDS.split())
    return rf"(?<![\p{{L}}\p{{N}}_.-])(?:{words})(?=\s+\S)"


def as_output(block: re.Match[str]) -> str:
    """A block of text without columns as `output`, whose lines wrap; else one that scrolls, with filled prose."""
    if not GAP.search(block[1]):
        return f"```output\n{block[1]}```"
    return "\n".join(["```text", *map(filled, block[1].splitlines()), "```"])


def filled(line: str) -> str:
    """A long line of a block with columns: the last of two columns is filled, a row of a table or a command is not."""
    gaps = list(re.finditer(r"\S {2,}(?=\S)", line))
    if len(line) <= WIDTH or len(gaps) > 1 or " --" in line:
        return line
    indent = gaps[0].end() if gaps else len(line) - len(line.lstrip()) + 4
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def plain(text: str) -> str:
    """A line of Markdown without its links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def opening(text: str) -> str:
    """The first paragraph of a page that is text, on one line, without its links."""
    paragraph = next(part for part in text.split("\n\n")[1:] if re.match(r"[\w`*]", part))
    return plain(" ".join(paragraph.split()))


def llms_txt(out: Path) -> None:
    """Each page's Markdown beside its HTML, and the two files by which language models find them.

    Source: https://llmstxt.org: a title, a summary, and lists of links under headings; Markdown at the address of a
    page with `index.html.md` appended.
    """
    nav = yaml.safe_load((out / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    described = {f"{page.name}.md": f"{page.text}." for page in page_lists.pages()}
    held: dict[str, list[Entry]] = {}
    for entry in reference().all():
        held.setdefault(f"reference/{entry.page}.md", []).append(entry)
    for page, entries in held.items():
        names = ", ".join(f"`{entry.name}`" for entry in entries)
        described[page] = (entries[0].summary if entries[0].thing.is_class else "") or names
    home = (out / "docs/README.md").read_text(encoding="utf-8")
    lines = [
        "# lightning_tricks",
        "",
        f"> {opening((ROOT / 'README.md').read_text(encoding='utf-8'))}",
        "",
        opening(home),
    ]
    full = lines.copy()
    for name, listed in parts(nav):
        lines += ["", f"## {name}", ""]
        for page in listed:
            text = (out / "docs" / page).read_text(encoding="utf-8")
            address = f"{page.removesuffix('.md').removesuffix('README').rstrip('/')}/index.html.md".lstrip("/")
            write(out / "html" / address, text)
            said = described.get(page) or opening(text)
            lines.append(f"- [{title(text)}]({address}): {said}")
            if not page.startswith("repository/"):
                full += ["", text.rstrip()]
    write(out / "html/llms.txt", "\n".join(lines) + "\n")
    write(out / "html/llms-full.txt", "\n".join(full) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(out: Path = OUT, url: str | None = None) -> list[str]:
    """Build the site anew; the lines of what is wrong with it, none if it is well."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stage(out)
    if url is not None:
        with (out / "mkdocs.yml").open("a", encoding="utf-8") as settings:
            settings.write(f"site_url: {url}\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file"]
    done = subprocess.run([*command, str(out / "mkdocs.yml")], capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).partition("Traceback (most recent call last)")[0]
        return re.sub(r"\x1b\[[\d;]*m", "", said).strip().splitlines()  # without its colours
    search_index(out / "html")
    not_found(out / "html")
    llms_txt(out)
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where the build finds something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the address at which the site will be served")
    options = parser.parse_args(argv)
    try:
        import zensical  # noqa: F401
    except ImportError:
        print("zensical is missing: pip install -c constraints.txt '.[docs]'", file=sys.stderr)
        return 1
    if found := build(url=options.url):
        print("\n".join(found))
        return 1
    print(f"{len(list((OUT / 'html').rglob('*.html')))} pages in {(OUT / 'html').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
