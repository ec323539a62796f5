"""docs/versions.md: its ranges are those of pyproject.toml, and its packages are there."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.pages

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirement(package):
    """The range of a dependency, such as `>=2.11`."""
    return next(line.removeprefix(package) for line in PROJECT["dependencies"] if re.match(rf"{package}[<>=!]", line))


def row(first):
    """The cells of the row of the table of ranges that begins so."""
    return next(line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith(f"| {first}"))


def test_the_ranges_are_those_of_the_package():
    assert f"`{PROJECT['requires-python']}`" == row("Python")[1]
    assert f"`{requirement('torch')}`" == row("torch")[1]
    lowest, *left_out = requirement("lightning").split(",")
    left_out = " and ".join(version.removeprefix("!=") for version in left_out)
    assert f"`{lowest}`, without {left_out}" == row("Lightning")[1]


def test_jsonargparse_has_the_extras_that_lightnings_next_release_asks_for():
    """Its command line refuses to build a parser without them."""
    (needed,) = [Requirement(line) for line in PROJECT["dependencies"] if line.startswith("jsonargparse")]
    assert needed.extras == {"jsonnet", "signatures"}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    own = {Requirement(line).name for line in importlib.metadata.requires("jsonargparse") if "jsonnet" in line}
    assert own <= pinned.keys()


def test_the_tested_versions_are_those_of_the_constraints():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert row("torch")[2] == pinned["torch"].partition("+")[0]
    assert row("Lightning")[2] == pinned["lightning"]
    assert f"Python {row('Python')[2]}:" in (ROOT / "constraints.txt").read_text().splitlines()[0]


def test_every_package_is_called_public_or_private():
    named = set(re.findall(r"`(?:lightning_tricks\.)?(\w+)`", " ".join(re.findall(r"^\| the names.*$", PAGE, re.M))))
    private = set(re.findall(r"`lightning_tricks\.(\w+)`", PAGE.split("Private, and free")[1].split("\n\n")[0]))
    packages = {path.parent.name for path in (ROOT / "lightning_tricks").glob("[a-z]*/__init__.py")}
    assert packages - {"recipes"} == (named - {"lightning_tricks", "__all__"}) | private
    assert private == {"cli", "commands", "logs"}


def test_the_page_on_installing_has_each_extra_with_its_packages():
    table = (ROOT / "docs/installing.md").read_text(encoding="utf-8").partition("| extra | brings |")[2]
    shown = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table.partition("\n\n")[0], re.M))
    extras = PROJECT["optional-dependencies"]
    wanted = {
        name: ", ".join(re.match(r"[\w-]+", one)[0] for one in packages)
        for name, packages in extras.items()
        if name not in ("test", "docs", "release")
    }
    assert shown == wanted
