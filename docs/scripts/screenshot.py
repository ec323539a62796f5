"""Photograph the dashboard of a run in a real browser.

Usage: python docs/scripts/screenshot.py runs/tiny docs/images/dashboard.png

The picture in docs/ is of recipes/tiny.yaml as it stands. Needs chromium on the PATH.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 800


def photograph(address: str, image: Path) -> None:
    """Save the tab at which the dashboard's address opens, as a picture of 128 colours."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers)), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address + "#scalars&_smoothingWeight=0")
        page.locator("vz-line-chart2 path").nth(20).wait_for(state="attached")
        page.wait_for_timeout(5000)  # the charts grow into their frames
        page.screenshot(path=image)
        browser.close()
    Image.open(image).convert("RGB").quantize(128).save(image, optimize=True)


def main(logdir: str, image: str) -> None:
    """Start a TensorBoard on any free port, wait until it says which, and stop it afterwards."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = next(filter(None, (re.search(r"http://[\w.:]+/", line) for line in server.stderr)))
        photograph(found[0], Path(image))
    finally:
        server.kill()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/scripts/screenshot.py LOGDIR IMAGE")
    main(*sys.argv[1:])
