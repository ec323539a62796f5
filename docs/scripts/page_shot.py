"""Photograph the top of a page of `compare` or `doctor` in a real browser, light and, beside it, dark.

    python -m lightning_tricks compare docs/samples/compare/base docs/samples/compare/lr3 --html compare.html
    python docs/scripts/page_shot.py compare.html docs/images/compare.png 412     # and docs/images/compare_dark.png

The last argument is how many pixels of its height are shown. Needs chromium on the PATH.
"""

import sys
from pathlib import Path

from PIL import Image
from site_shots import THEMES, browser

WIDTH = 900


def photograph(page: Path, image: Path, height: int) -> None:
    """Save a picture for each theme, twice as fine as the screen, of 64 colors."""
    with browser() as chromium:
        for theme in THEMES:
            size = {"width": WIDTH, "height": height}
            tab = chromium.new_page(viewport=size, color_scheme=theme, device_scale_factor=2)
            tab.goto(page.resolve().as_uri())
            file = image if theme == "light" else image.with_stem(f"{image.stem}_dark")
            tab.screenshot(path=file)
            tab.close()
            Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python docs/scripts/page_shot.py PAGE.html IMAGE.png HEIGHT")
    photograph(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
