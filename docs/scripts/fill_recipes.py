"""The tables of docs/recipes.md, for `fill.py`, from the recipes, their headers and `benchmarks.recipe_plans`."""

import re
from pathlib import Path
from typing import Any

from filler import Filler

# What a recipe has reached, in words; each figure stands in the recipe's own header, with machine and date.
MEASURED = {
    "tiny": "1.79 bits/byte; 75 to 140 seconds at 7 to 15 k tokens/s in bf16 on 2 cores",
    "small": "1.08 bits/byte after about 20 minutes at 8.4 k tokens/s in bf16 on 2 cores",
    "gpt2_124m": "537 k tokens/s on one H200, 24.2 GiB",
    "llama7b_1gpu": "13.2 k tokens/s on an H200, 109.4 GiB, with BF16True and no checkpointing",
}
HEAD = "recipe|parameters|tokens a step|tokens in all|planned on|memory of a device|time"
GROWTH = ("", " k", " M", " B", " T")


def header(recipe: Path) -> str:
    """The comment at the top of a recipe, in one line."""
    lines = re.match(r"(?:#.*\n)+", recipe.read_text(encoding="utf-8"))
    return " ".join(line.lstrip("# ") for line in lines[0].splitlines()) if lines else ""


def measured(recipe: Path) -> str:
    """What was measured.

    Raises:
        ValueError: a figure that the recipe's header does not have.
    """
    if recipe.stem not in MEASURED:
        return "not measured"
    known = re.findall(r"\d[\d.]*\d|\d", header(recipe))
    for figure in re.findall(r"\d[\d.]*\d|\d", MEASURED[recipe.stem]):
        if figure not in known:
            raise ValueError(f"{recipe.name}: {figure} is not in its header: change MEASURED, or the header")
    return MEASURED[recipe.stem]


def short(number: float) -> str:
    """Three digits and a power of a thousand: 2,013,265,920,000 is 2.01 T."""
    power = 0
    while number >= 999.5 and power < len(GROWTH) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{GROWTH[power]}"


def duration(hours: float) -> str:
    """In hours up to two days, else in days."""
    if hours < 10:
        return f"{hours:.1f} hours"
    return f"{hours:,.0f} hours" if hours < 48 else f"{hours / 24:,.0f} days"


def row(recipe: Path, plan: dict[str, Any]) -> list[str]:
    """The figures of a recipe.

    Args:
        recipe: its file.
        plan: of this file, as `benchmarks.recipe_plans` wrote it.

    Raises:
        ValueError: the plan is of another text of the recipe.
    """
    from benchmarks.recipe_plans import sha256

    if plan.get("sha256") != sha256(recipe):
        raise ValueError(f"{recipe.name} has changed since it was planned: run python -m benchmarks.recipe_plans")
    devices = f"{plan['devices']:,} x {plan['device']}" if plan["device_gib"] else plan["device"]
    memory = f"{plan['peak_gib']:.1f} GiB"
    if plan["device_gib"]:
        memory += f" of {plan['device_gib']:.1f}" + ("" if plan["fits"] else ": does not fit")
    return [
        f"[`{recipe.stem}`](../recipes/{recipe.name})",
        f"{plan['parameters']:,}",
        f"{plan['tokens_a_step']:,}",
        short(plan["tokens"]),
        devices,
        memory,
        duration(plan["hours"]) if plan["hours"] else "see above",
    ]


def texts(result: dict[str, Any]) -> dict[str, str]:
    """The gallery, smallest model first; and what `ls` says of each recipe, with what was measured."""
    from fill_optimizers import table

    from lightning_tricks.commands import recipes_folder

    plans = result["recipes"]
    recipes = sorted(recipes_folder().glob("*.yaml"), key=lambda path: plans.get(path.stem, {}).get("parameters", 0))
    about = [["recipe", "for", "measured"], ["---"] * 3]
    for recipe in recipes:
        first = recipe.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        about.append([f"`{recipe.stem}`", first, measured(recipe)])
    described = result["machine"]
    said = (
        f"Planned {described['date'][:10]} by `python -m benchmarks.recipe_plans`, at a stated MFU of 40 %, "
        f"torch {described['versions']['torch']}."
    )
    rows = [row(recipe, plans.get(recipe.stem, {})) for recipe in recipes]
    return {
        "gallery": "\n".join(f"| {' | '.join(cells)} |" for cells in about),
        "plans": f"{table(HEAD.split('|'), rows)}\n\n{said}",
    }


FILLERS = {"recipe-plans": Filler("recipes.md", texts)}
