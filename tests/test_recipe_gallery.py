"""docs/recipes.md: each row has the figures of its recipe as it stands, and of a plan that `plan` gives again."""

import re

import fill
import fill_recipes
import pytest
from cli.parsers import no_hyper_parameters, shared_parser  # noqa: F401, fixtures

from benchmarks import recipe_plans
from lightning_tricks.commands import recipes_folder

pytestmark = pytest.mark.pages

RECIPES = sorted(recipes_folder().glob("*.yaml"))
PAGE = (fill.DOCS / "recipes.md").read_text(encoding="utf-8")
PLANS = fill.result_of("recipe-plans")["recipes"]


def row(name):
    """The cells of a recipe's row in the table of plans."""
    (line,) = re.findall(rf"^\| \[`{name}`\]\(.*\) \| (.+) \|$", PAGE, re.M)
    return line.split(" | ")


def test_every_recipe_is_planned_and_no_other():
    assert PLANS.keys() == {recipe.stem for recipe in RECIPES}


@pytest.mark.usefixtures("shared_parser", "no_hyper_parameters")
def test_a_plan_made_now_is_that_of_the_page():
    recipe = recipes_folder() / "gpt2_124m.yaml"
    now = recipe_plans.planned(recipe)
    planned = PLANS["gpt2_124m"]
    assert now | {"peak_gib": 0} == planned | {"peak_gib": 0}
    assert now["peak_gib"] == pytest.approx(planned["peak_gib"], rel=0.02)  # another torch may keep other tensors
    parameters, tokens, in_all, devices, memory, time = row("gpt2_124m")
    assert (parameters, tokens, devices) == ("124,373,760", "524,288", "1 x H100")
    assert in_all == "75 B"  # 143,000 steps x 524,288
    assert memory == f"{planned['peak_gib']:.1f} GiB of 74.5"
    assert time == f"{now['hours']:.0f} hours"


def test_the_row_of_llama7b_has_the_figures_of_the_page_on_plans():
    plan = (fill.DOCS / "plan.md").read_text(encoding="utf-8")
    (whole,) = re.findall(r"fits: ([\d.]+) GiB of 74.51 GiB", plan)
    (days,) = re.findall(r"time +(\d+) d \d+ h on 8 x H100", plan)
    assert row("llama7b")[4:] == [f"{float(whole):.1f} GiB of 74.5", f"{float(days):.0f} days"]


def test_what_was_measured_stands_in_the_header_of_the_recipe(monkeypatch):
    for recipe in RECIPES:
        assert f"| `{recipe.stem}` |" in PAGE
    known = {recipe.stem for recipe in RECIPES if fill_recipes.measured(recipe) != "not measured"}
    assert known == {"tiny", "small", "gpt2_124m", "llama7b_1gpu"}
    monkeypatch.setitem(fill_recipes.MEASURED, "tiny", "1.78 bits/byte")
    with pytest.raises(ValueError, match=r"tiny\.yaml: 1\.78 is not in its header"):
        fill_recipes.measured(recipes_folder() / "tiny.yaml")
