"""Which precision, strategy, optimizer: every line that a table gives for a recipe is taken by the recipe `tiny`."""

import re
from itertools import zip_longest
from pathlib import Path

import pytest
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures

from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder

pytestmark = pytest.mark.pages

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACES = {"precision": "trainer", "strategies": "trainer", "which_optimizer": "model.init_args"}  # of a line


def lines(page):
    """The lines of a page's first table, without those in words."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    table = re.search(r"^\| you have \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.M)
    cells = [row.strip("| ").split(" | ")[2] for row in table[1].splitlines()]
    return [match[1] for cell in cells if (match := re.match(r"`(\w+: .+?)`", cell))]


@pytest.mark.parametrize("page", PLACES)
def test_a_page_begins_with_its_table_and_most_rows_have_a_line(page):
    before, _, rest = (DOCS / f"{page}.md").read_text(encoding="utf-8").partition("| you have |")
    assert len(before.splitlines()) < 12
    assert before.count("## ") == 1
    assert len(lines(page)) >= rest.partition("\n\n")[0].count("\n") - 4 > 2


# one line of each page at a time, as a parse takes half a second
TRIALS = [dict(zip(PLACES, trial, strict=True)) for trial in zip_longest(*map(lines, PLACES))]


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: "; ".join(filter(None, trial.values())))
def test_the_recipe_takes_the_lines(trial, tmp_path):
    options = ["--config", str(recipes_folder() / "tiny.yaml")]
    for page, line in trial.items():
        if line is not None:
            place = ["trainer"] if line.startswith("plugins") else PLACES[page].split(".")
            above = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(place))
            (tmp_path / f"{page}.yaml").write_text(f"{above}{'  ' * len(place)}{line}\n", encoding="utf-8")
            options += ["--config", str(tmp_path / f"{page}.yaml")]
    _, _, trainer = load_recipe(*options)
    named = {page: re.match(r"\w+: (?:\[?\{class_path: |\[)(\w+)", line or "") for page, line in trial.items()}
    if named["strategies"] is not None:
        assert type(trainer["strategy"]).__name__ == named["strategies"][1]
    if named["precision"] is not None and not str(trial["which_optimizer"]).startswith("plugins"):
        assert [type(plugin).__name__ for plugin in trainer["plugins"]] == [named["precision"][1]]
