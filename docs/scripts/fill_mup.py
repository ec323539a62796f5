"""The table and the plot of docs/mup.md, for `fill.py`: the best learning rate at each width, with muP and without."""

import statistics
from pathlib import Path
from typing import Any

from filler import Filler

from benchmarks.mup_transfer import best, shift

TITLES = {False: "without muP", True: "with muP"}


def widths_of(result: dict[str, Any]) -> list[int]:
    """The widths that were measured, ascending."""
    return sorted({run["width"] for run in result["runs"]})


def texts(result: dict[str, Any]) -> dict[str, str]:
    """The best learning rate at each width, and its loss, by the name of the place in the page."""
    runs, widths = result["runs"], widths_of(result)
    lines = ["| width | best lr without muP | loss | best lr with muP | loss |", "|--:|--:|--:|--:|--:|"]
    for width in widths:
        cells = (f"{best(runs, width, mup)[0]:.5f} | {best(runs, width, mup)[1]:.3f}" for mup in (False, True))
        lines.append(f"| {width} | {' | '.join(cells)} |")
    moved = {mup: f"{shift(runs, widths, mup):+.0f}" for mup in (False, True)}
    steps, seeds = runs[0]["steps"], len({run["seed"] for run in runs})
    machine = result["machine"]
    note = (
        f"From width {widths[0]} to {widths[-1]} the best learning rate moves by {moved[False]} steps of a 2x grid "
        f"without muP and by {moved[True]} with it. {steps} training steps, loss on held-out text in nats a token, "
        f"seeds: {seeds}; torch {machine['versions']['torch']}, {machine['cpu']}, {machine['date'][:10]}."
    )
    return {"transfer": "\n".join([*lines, "", note])}


def draw(result: dict[str, Any], file: Path) -> None:
    """Loss over learning rate: a line a width, its best one marked; without muP on the left, with it on the right."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs, base = result["runs"], result["base_width"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, mup in zip(axes, (False, True), strict=True):
        for width in widths_of(result):
            found: dict[float, list[float]] = {}
            for run in runs:
                if run["width"] == width and (run["mup"] == mup or width == base) and run["val_loss"] is not None:
                    found.setdefault(run["lr"], []).append(run["val_loss"])
            lrs = sorted(found)
            means = [statistics.mean(found[lr]) for lr in lrs]
            (line,) = axis.plot(lrs, means, linewidth=1, marker=".", label=f"{width}")
            axis.plot(*best(runs, width, mup), marker="o", color=line.get_color())
        axis.set_title(TITLES[mup], fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
        axis.legend(title="width", fontsize=8)
    axes[0].set_ylabel("loss on held-out text, nats/token")
    figure.tight_layout()
    mpl.rcParams["svg.hashsalt"] = "mup"
    figure.savefig(file, metadata={"Date": None})


FILLERS = {
    "mup-transfer": Filler("mup.md", texts, draw),
}
