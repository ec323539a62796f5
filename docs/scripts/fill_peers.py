"""The tables and the plot of docs/speed.md, for `fill.py`: a training step of each peer."""

import re
import statistics
from pathlib import Path
from typing import Any

from filler import Filler
from plot_style import save, themes

from benchmarks.peers import BASE, table, title

NAMES = {  # what the page and the plot call a peer of `benchmarks.peers`, in their order
    "bare_hand": "hand-written loop and model",
    "bare_ours": "hand-written loop, our decoder",
    "bare_hf": "hand-written loop, transformers' Llama",
    "litgpt": "litgpt",
    "lightning_hf": "Lightning, transformers' Llama",
    "hf_trainer": "transformers' Trainer",
    "ours": "our recipe",
    "ours_watched": "our recipe with monitors",
}


def texts(result: dict[str, Any]) -> dict[str, str]:
    """A table a run, what was left out, and the machine, by the name of the place in the page."""
    described, runs = result["machine"], result["runs"]
    versions = ", ".join(
        f"{name} {described['versions'][name]}"
        for name in ("torch", "lightning", "transformers", "accelerate", "litgpt")
        if name in described["versions"]
    )
    loads = [load for run in runs for load in (run["load_average"][0][0], run["load_average"][1][0])]
    left_out = [f"{NAMES[name]}: {why}" for name, why in result["skipped"].items()]
    left_out += [f"{NAMES[name]} ({title(run)}): {why}" for run in runs for name, why in run["failed"].items()]
    lines = [
        f"Measured {described['date'][:10]} on one thread of a CPU with {described['cores']} cores "
        f"({described['cpu']}), load average {min(loads):.1f} to {max(loads):.1f}: {versions}. Rounds: "
        + "; ".join(f"{title(run)}: {run['rounds']} of {run['steps']} steps" for run in runs)
        + ". In brackets the extremes over the rounds.",
        *(["", f"Left out: {'; '.join(left_out)}."] if left_out else []),
    ]
    tables = [_named(table(run)) for run in runs]
    return {"peers": "\n\n".join([*tables, "\n".join(lines)])}


def _named(text: str) -> str:
    """A table of `benchmarks.peers` with the names that a reader knows."""
    text = re.sub(r"^\| `(\w+)` \|", lambda match: f"| {NAMES[match[1]]} |", text, flags=re.M)
    return text.replace(f"CPU / {BASE}", "CPU / hand-written")


def draw(result: dict[str, Any], file: Path) -> None:
    """CPU time over that of the base, a bar a peer with a mark a round, a panel a run; light, and dark beside it."""
    import matplotlib.pyplot as plt

    runs = result["runs"]
    rows = [len(run["peers"]) for run in runs]
    for theme, target in themes(file):
        size = (7.6, 0.32 * sum(rows) + 0.6 * len(rows) + 0.8)
        shape = {"height_ratios": rows}
        figure, axes = plt.subplots(len(runs), 1, figsize=size, sharex=True, squeeze=False, gridspec_kw=shape)
        for axis, run in zip(axes[:, 0], runs, strict=True):
            names = [name for name in NAMES if name in run["peers"]]
            rounds = [run["peers"][name]["cpu_ratio"]["rounds"] for name in names]
            colors = [theme.ours if "ours" in name else theme.others for name in names]
            axis.barh([NAMES[name] for name in names], [statistics.median(values) for values in rounds], color=colors)
            for place, values in enumerate(rounds):
                axis.plot(values, [place] * len(values), "|", color=theme.ink, markersize=8)
            axis.axvline(1, color=theme.ink, linewidth=1, linestyle="--")
            axis.invert_yaxis()
            axis.set_title(title(run).replace("M,", "M parameters,"))
            axis.tick_params(axis="y", length=0)
        axes[-1, 0].set_xlabel("CPU time of a step over that of the hand-written loop")
        key = [
            plt.Rectangle((0, 0), 1, 1, color=theme.ours, label="ours, median"),
            plt.Rectangle((0, 0), 1, 1, color=theme.others, label="others, median"),
            plt.Line2D([], [], color=theme.ink, marker="|", linestyle="", markersize=8, label="one round"),
        ]
        figure.legend(handles=key, loc="upper center", ncols=len(key))
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / size[1]))
        save(figure, target)


FILLERS = {
    "peers": Filler("speed.md", texts, draw),
}
