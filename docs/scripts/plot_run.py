"""Draw the curves of a run from its TensorBoard log, for a light page and, beside it, for a dark one.

    python docs/scripts/plot_run.py runs/tiny docs/images/tiny.svg 2.0659     # and docs/images/tiny_dark.svg

The last argument is the figure of `zlib -9` that the run prints at its end.
"""

import sys
from pathlib import Path

from plot_style import save, themes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Scalars = dict[str, tuple[list[int], list[float]]]
PANELS = {  # title, tags; each title says what the vertical axis is
    "loss, nats per token": ("train/loss", "val/loss"),
    "validation, bits per byte": ("val/bits_per_byte",),
    "gradient norm before clipping": ("train/grad_norm",),
    "learning rate": ("train/lr",),
}
NAMES = {"train/loss": "training", "val/loss": "validation"}
FEW = 20  # points that are marked one by one


def read(folder: Path) -> Scalars:
    """Steps and values of each scalar in the newest version folder, every point of it."""
    newest = max(folder.glob("version_*"), key=lambda path: path.stat().st_mtime)
    events = EventAccumulator(str(newest), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: ([e.step + 1 for e in events.Scalars(tag)], [e.value for e in events.Scalars(tag)])
        for tag in events.Tags()["scalars"]
    }


def draw(scalars: Scalars, zlib: float, file: Path) -> None:
    """Loss and validation bits/byte above, beside those of `zlib -9`; norm and learning rate below."""
    import matplotlib.pyplot as plt

    for theme, target in themes(file):
        figure, axes = plt.subplots(2, 2, figsize=(7.6, 4.4), sharex=True)
        for axis, (title, tags) in zip(axes.flat, PANELS.items(), strict=True):
            for tag in tags:
                steps, values = scalars[tag]
                color = theme.second if tag.startswith("val") else theme.ours
                mark = "o" if len(steps) < FEW else None
                axis.plot(steps, values, color=color, linewidth=1.3, marker=mark, label=NAMES.get(tag))
            axis.set_title(title)
            axis.grid(alpha=0.6)
        axes[0, 0].legend()
        axes[0, 1].axhline(zlib, color=theme.others, linestyle="--")
        axes[0, 1].text(0, zlib, "zlib -9", color=theme.ink, fontsize=11, verticalalignment="bottom")
        axes[0, 1].margins(y=0.2)
        axes[1, 0].set_yscale("log")
        limits = axes[1, 0].get_ylim()
        axes[1, 0].set_yticks([0.5, 1, 2, 5], labels=["0.5", "1", "2", "5"])
        axes[1, 0].set_ylim(limits)  # which a tick outside would move
        axes[1, 0].minorticks_off()
        for axis in axes[1]:
            axis.set_xlabel("step")
        figure.tight_layout()
        save(figure, target)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python docs/scripts/plot_run.py RUN_FOLDER IMAGE.svg BITS_PER_BYTE_OF_ZLIB")
    draw(read(Path(sys.argv[1])), float(sys.argv[3]), Path(sys.argv[2]))
