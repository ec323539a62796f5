"""The tables and the plot of docs/precision.md, for `fill.py`: loss curves of every number format."""

from pathlib import Path
from typing import Any

from filler import Filler

TITLES = {
    "fp32": "fp32",
    "fp32_another_seed": "fp32, another seed",
    "bf16_mixed": "`BF16Mixed()`",
    "bf16_true_naive": "Lightning's `bf16-true`",
    "bf16_true_stochastic": "`BF16True()`",
    "fp16": "`FP16Mixed()`",
    "fp16_unscaled": "`FP16Mixed(loss_scaling=False)`",
    "fp8_tensorwise": '`Float8("tensorwise")`',
    "fp8_rowwise": '`Float8("rowwise")`',
    "fp8_rowwise_with_gw_hp": '`Float8("rowwise_with_gw_hp")`',
    "mxfp8": '`Float8("mxfp8")`',
}


HEAD = ["| format | validation, bits/byte | against fp32 | weights that never moved |", "|---|--:|--:|--:|"]


def texts(result: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place in the page."""
    runs, steps = result["runs"], result["steps"]
    peak = runs[0]["lr"]
    small, normal, large = sorted({run["lr"] for run in runs} - {peak})
    clip = ["| peak lr | validation, bits/byte | steps that were clipped |", "|---|--:|--:|"]
    for lr in (normal, peak, large):
        run = chosen(runs, lr, steps)["bf16_mixed"]
        clip.append(f"| {lr:.0e} | {run['bits_per_byte']:.4f} | {run['clipped_share']:.1%} |")
    return {
        "formats": "\n".join([*HEAD, *rows(chosen(runs, peak, steps))]),
        "small lr": "\n".join([*HEAD, *rows(chosen(runs, small, steps))]),
        "fp16": "\n".join([*HEAD, *rows(chosen(runs, peak, steps // 4))]),
        "clip": "\n".join(clip),
    }


def chosen(runs: list[dict[str, Any]], lr: float, steps: int) -> dict[str, dict[str, Any]]:
    """The runs at one learning rate over so many steps, by format."""
    here = (run for run in runs if run["lr"] == lr and run["steps"] == steps)
    return {run["format"]: run for run in here if run["format"] in TITLES}


def rows(at: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each format, compared with fp32's run."""
    reference = at["fp32"]["bits_per_byte"]
    return [
        f"| {TITLES[name]} | {at[name]['bits_per_byte']:.4f} | {at[name]['bits_per_byte'] / reference - 1:+.2%} "
        f"| {at[name]['frozen_share']:.1%} |"
        for name in TITLES
        if name in at
    ]


def draw(result: dict[str, Any], file: Path) -> None:
    """How far each format's training loss lies from fp32's; and the runs at the small learning rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs, steps = result["runs"], result["steps"]
    peak, small = runs[0]["lr"], min(run["lr"] for run in runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    at_peak = chosen(runs, peak, steps)
    reference = at_peak["fp32"]["loss"]
    at = [(index + 1) * steps / len(reference) for index in range(len(reference))]
    for name, run in at_peak.items():
        if name != "fp32":
            gap = [mine - theirs for mine, theirs in zip(run["loss"], reference, strict=True)]
            left.plot(at, gap, linewidth=1, label=TITLES[name].replace("`", ""))
    for name, run in chosen(runs, small, steps).items():
        right.plot(at, run["loss"], linewidth=1, label=TITLES[name].replace("`", ""))
    left.set_title(f"lr {peak:g}: loss less fp32's, nats/token", fontsize=10)
    left.set_ylim(-0.1, 0.4)
    right.set_title(f"lr {small:g}: loss, nats/token", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.tight_layout()
    mpl.rcParams["svg.hashsalt"] = "precision"
    figure.savefig(file, metadata={"Date": None})


FILLERS = {
    "precision": Filler("precision.md", texts, draw),
}
