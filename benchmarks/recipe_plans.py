"""Plan every recipe on the devices that its header names: memory of a device and hours, for docs/recipes.md.

`python -m benchmarks.recipe_plans` takes about a minute of CPU time and needs no GPU. The result names each recipe's
file by its SHA-256, so that a page made from it is out of date when a recipe has changed.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks.cli import load_recipe
from lightning_tricks.commands import recipes_folder
from lightning_tricks.commands.plan import PlanOptions
from lightning_tricks.commands.plan.plan import plan_recipe

# The device of each recipe's header, by its word for `plan`; a CPU where the header names none.
DEVICES = {
    "gpt2_124m": "h100",
    "speedrun_124m": "h100",
    "llama1b": "h100",
    "llama7b": "h100",
    "llama7b_1gpu": "h200",
    "llama7b_deepspeed": "h100",
    "llama70b": "h100",
    "llama405b": "h100",
    "llama405b_3d": "h100",
    "mixtral_8x7b": "h100",
    "moe_671b": "h100",
}


def sha256(recipe: Path) -> str:
    """Identity of a recipe's text."""
    return hashlib.sha256(recipe.read_bytes()).hexdigest()


def planned(recipe: Path) -> dict[str, Any]:
    """The plan of a recipe: bytes of the largest instant on a device, with CUDA's own, and hours at an MFU of 40 %."""
    gpu = DEVICES.get(recipe.stem)
    options = [] if gpu else ["--trainer.accelerator", "cpu"]
    made = plan_recipe(*load_recipe("--config", str(recipe), *options), PlanOptions(gpu=gpu), suggest=False)
    return {
        "sha256": sha256(recipe),
        "device": made.device.name if gpu else "CPU",
        "device_gib": made.device.bytes / 2**30 if gpu else None,
        "devices": made.setup.world,
        "parameters": sum(made.parameters.values()),
        "tokens_a_step": made.tokens_a_step,
        "tokens": made.tokens,
        "peak_gib": None if made.peak_bytes is None else made.peak_bytes / 2**30,
        "fits": made.fits,
        "mfu": made.mfu,
        "hours": made.hours if gpu else None,  # a CPU's peak is that of the moment
    }


def main(given: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe_plans", description=__doc__)
    default = Path(__file__).parent / "results" / f"recipe-plans-{machine.today()}-cpu.json"
    parser.add_argument("--out", type=Path, default=default, help="JSON file; default: in benchmarks/results")
    parser.add_argument("--recipes", default="", help="names with commas between; default: all")
    options = parser.parse_args(given)
    rows: dict[str, Any] = {}
    with machine.quiet():
        for recipe in sorted(recipes_folder().glob("*.yaml")):
            if not options.recipes or recipe.stem in options.recipes.split(","):
                rows[recipe.stem] = planned(recipe)
                print(recipe.stem, rows[recipe.stem], flush=True)
        write(options.out, {"machine": machine.describe(), "recipes": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
