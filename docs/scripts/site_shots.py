"""Take each page of the built site in a real browser, light and dark, on two desktops and a phone.

    python docs/scripts/build_site.py && python docs/scripts/site_shots.py
    python docs/scripts/site_shots.py mfu reference/callbacks    # these pages

Pictures and contact sheets go into build/site/shots. Names each page that is wider than its window, whose console has
an error, or which asks for a file that is not there; then it exits with 1. Needs chromium on the PATH, and playwright.
"""

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[2] / "build/site"
WIDTHS = {1920: 1080, 1280: 900, 390: 844}  # and the heights of the windows
THEMES = ("light", "dark")
TALLEST = 2600  # pixels of a page that a picture shows
COLUMNS, ROWS, THUMB = 6, 2, 320  # of a contact sheet


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, on a free port."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def chromium_path() -> str | None:
    """Debian's browser or Google's, None where there is neither."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A chromium without a window."""
    from playwright.sync_api import sync_playwright

    found = chromium_path()
    if found is None:
        raise SystemExit("none of chromium, chromium-browser, google-chrome is on the PATH")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def pages(site: Path = SITE) -> list[str]:
    """The addresses of all pages below the site's own."""
    found = (path.parent.relative_to(site / "html").as_posix() for path in (site / "html").rglob("index.html"))
    return sorted("" if page == "." else f"{page}/" for page in found)


def photograph(names: Sequence[str], shots: Path) -> list[str]:
    """A picture of each page in each theme and width; what is wrong."""
    found: list[str] = []
    with served(SITE / "html") as address, browser() as chromium:
        for theme in THEMES:
            for width, height in WIDTHS.items():
                folder = shots / f"{theme}-{width}"
                folder.mkdir(parents=True, exist_ok=True)
                tab, said = watched(chromium, width, height, theme)
                for page in names:
                    file = folder / f"{page.strip('/').replace('/', '.') or 'home'}.png"
                    faults = look_at(tab, address + page) + said
                    found += [f"{theme} {width} {page or 'home'}: {fault}" for fault in faults]
                    said.clear()
                    high = min(TALLEST, tab.evaluate("document.documentElement.scrollHeight"))
                    tab.screenshot(path=file, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": high})
                tab.close()
    return found


def watched(chromium: Any, width: int, height: int, theme: str) -> tuple[Any, list[str]]:
    """A tab, and the list into which its errors are written."""
    said: list[str] = []
    tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    tab.on("console", lambda message: said.append(f"console: {message.text}") if message.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(f"error: {error}"))
    tab.on("response", lambda got: said.append(f"{got.status} {got.url}") if got.status >= 400 else None)
    return tab, said


def look_at(tab: Any, address: str) -> list[str]:
    """Open a page; what is wrong with its form."""
    said = []
    tab.goto(address)
    wide, window = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    if wide > window:
        said.append(f"is {wide} pixels wide in a window of {window}")
    blank = tab.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    return said + [f"image {image} shows nothing" for image in blank]


def contact_sheets(shots: Path) -> list[Path]:
    """Several pages in one picture, for each theme and width."""
    from PIL import Image

    made = []
    for folder in sorted(path for path in shots.iterdir() if path.is_dir()):
        pictures = sorted(folder.glob("*.png"))
        high = THUMB * 2
        for first in range(0, len(pictures), COLUMNS * ROWS):
            sheet = Image.new("RGB", (COLUMNS * THUMB, ROWS * high), "gray")
            for at, file in enumerate(pictures[first : first + COLUMNS * ROWS]):
                picture = Image.open(file).convert("RGB")
                picture = picture.resize((THUMB - 6, round(picture.height * (THUMB - 6) / picture.width)))
                sheet.paste(picture.crop((0, 0, THUMB - 6, min(high - 6, picture.height))),
                            ((at % COLUMNS) * THUMB, (at // COLUMNS) * high))  # fmt: skip
            made.append(shots / f"sheet-{folder.name}-{first // (COLUMNS * ROWS)}.png")
            sheet.save(made[-1])
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a page has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="addresses of pages below the site's own; all by default")
    options = parser.parse_args(argv)
    if not (SITE / "html").is_dir():
        parser.error("build/site/html is missing: run python docs/scripts/build_site.py first")
    names = [f"{page.strip('/')}/".lstrip("/") for page in options.pages] or pages()
    if unknown := [page for page in names if not (SITE / "html" / page / "index.html").is_file()]:
        parser.error(f"the site has no page {unknown[0]}")
    shots = SITE / "shots"
    if shots.exists():
        shutil.rmtree(shots)
    found = photograph(names, shots)
    print("\n".join([*map(str, contact_sheets(shots)), *found]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
