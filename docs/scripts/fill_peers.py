"""The tables and the plot of docs/speed.md, for `fill.py`: a training step of each peer."""

import statistics
from pathlib import Path
from typing import Any

from filler import Filler

from benchmarks.peers import BASE, table, title


def texts(result: dict[str, Any]) -> dict[str, str]:
    """A table a run, what was left out, and the machine, by the name of the place in the page."""
    described, runs = result["machine"], result["runs"]
    versions = ", ".join(
        f"{name} {described['versions'][name]}"
        for name in ("torch", "lightning", "transformers", "accelerate", "litgpt")
        if name in described["versions"]
    )
    loads = [load for run in runs for load in (run["load_average"][0][0], run["load_average"][1][0])]
    left_out = [f"`{name}`: {why}" for name, why in result["skipped"].items()]
    left_out += [f"`{name}` ({title(run)}): {why}" for run in runs for name, why in run["failed"].items()]
    lines = [
        f"Measured {described['date'][:10]} on one thread of a CPU with {described['cores']} cores "
        f"({described['cpu']}), load average {min(loads):.1f} to {max(loads):.1f}: {versions}. Rounds: "
        + "; ".join(f"{title(run)}: {run['rounds']} of {run['steps']} steps" for run in runs)
        + ". In brackets the extremes over the rounds.",
        *(["", f"Left out: {'; '.join(left_out)}."] if left_out else []),
    ]
    return {"peers": "\n\n".join([*(table(run) for run in runs), "\n".join(lines)])}


def draw(result: dict[str, Any], file: Path) -> None:
    """CPU time over that of the base, a bar a peer with a mark a round, a panel a run; light, and dark beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = result["runs"]
    for style, target in (("default", file), ("dark_background", file.with_stem(f"{file.stem}_dark"))):
        with plt.style.context(style):
            mpl.rcParams["svg.hashsalt"] = "peers"  # which the style `default` resets
            figure, axes = plt.subplots(1, len(runs), figsize=(4.5 * len(runs), 3.2), squeeze=False)
            for axis, run in zip(axes[0], runs, strict=True):
                names = list(run["peers"])[::-1]
                rounds = [run["peers"][name]["cpu_ratio"]["rounds"] for name in names]
                colors = ["tab:orange" if "ours" in name else "tab:gray" for name in names]
                axis.barh(names, [statistics.median(values) for values in rounds], color=colors)
                for place, values in enumerate(rounds):
                    axis.plot(values, [place] * len(values), "|", color="tab:blue")
                axis.set_title(title(run), fontsize=10)
                axis.set_xlabel(f"CPU time of a step, {BASE} = 1")
            figure.tight_layout()
            figure.savefig(target, metadata={"Date": None}, transparent=True)
            plt.close(figure)


FILLERS = {
    "peers": Filler("speed.md", texts, draw),
}
