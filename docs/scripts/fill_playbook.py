"""The plots and findings of docs/playbook.md, for `fill.py`: each planted fault beside a run without it."""

import textwrap
from pathlib import Path
from typing import Any

from filler import Filler

FAULT, HEALTHY, TEXT = "#d9534f", "#8a8a8a", "#808080"  # readable on white and on black
LOGARITHMIC = ("grad_norm", "loss_scale", "max_logit")


def texts(result: dict[str, Any]) -> dict[str, str]:
    """What `doctor` says of each fault, by the name of its place in the page."""
    return {
        **{name: _block(one["finding"]) for name, one in result["pictures"].items()},
        "measured": f"The runs were made {result['machine']['date'][:10]} on a CPU with {result['machine']['cores']} "
        "cores.",
    }


def _block(finding: dict[str, Any]) -> str:
    head = f"{finding['severity']}: {finding['symptom'].replace('_', ' ')}"
    rows = [("evidence", "evidence"), (f"cause ({finding['status']})", "cause"), ("remedy", "remedy")]
    lines = [textwrap.fill(f"{name}: {finding[key]}", 88, subsequent_indent="  ") for name, key in rows]
    return "\n".join(["```text", head, *lines, "```"])


def draw(result: dict[str, Any], file: Path) -> None:
    """One picture a fault, beside `file`, with its name and that of the fault."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "svg.hashsalt": "playbook", "svg.fonttype": "none", "text.color": TEXT, "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    for name, one in result["pictures"].items():
        with plt.rc_context(style):
            figure, axes = plt.subplots(1, len(one["curves"]), figsize=(8, 2.4), squeeze=False)
            for axis, (metric, runs) in zip(axes[0], one["curves"].items(), strict=True):
                for kind, color, label in (("healthy", HEALTHY, "without the fault"), ("fault", FAULT, one["what"])):
                    if kind in runs:
                        points = runs[kind]["steps"], runs[kind]["values"]
                        mark = "." if len(points[0]) < 20 else None
                        axis.plot(*points, color=color, linewidth=1.2, marker=mark, markersize=4, label=label)
                for step in one["finding"]["steps"]:
                    axis.axvline(step, color=TEXT, linewidth=0.6, linestyle="--")
                if "level" in one:
                    axis.axhline(one["level"], color=FAULT, linewidth=0.8, linestyle="--", label="the clip")
                if any(part in metric for part in LOGARITHMIC) and min(runs["fault"]["values"], default=0) > 0:
                    axis.set_yscale("log")
                axis.set_title(metric, fontsize=9)
                axis.set_xlabel("step")
            handles, labels = axes[0][-1].get_legend_handles_labels()
            figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False, bbox_to_anchor=(0.5, -0.09))
            figure.tight_layout()
            figure.savefig(
                file.with_stem(f"{file.stem}_{name}"), metadata={"Date": None}, transparent=True, bbox_inches="tight"
            )
            plt.close(figure)


FILLERS = {
    "playbook": Filler("playbook.md", texts, draw),
}
