"""Draw the loss curves of a run from its TensorBoard log.

Usage: python docs/scripts/plot_run.py runs/small docs/images/small.svg
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each scalar in the newest version folder, every point of it."""
    newest = max(folder.glob("version_*"), key=lambda path: path.stat().st_mtime)
    events = EventAccumulator(str(newest), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: ([e.step + 1 for e in events.Scalars(tag)], [e.value for e in events.Scalars(tag)])
        for tag in events.Tags()["scalars"]
    }


def draw(scalars: dict[str, tuple[list[int], list[float]]], title: str, file: Path) -> None:
    """Training loss and validation bits/byte above, norm and lr below."""
    figure, ((loss, bits), (norm, lr)) = plt.subplots(2, 2, figsize=(9, 5), sharex=True)
    panels = [
        (loss, ["train/loss", "val/loss"], "loss, nats/token"),
        (bits, ["val/bits_per_byte"], "validation, bits/byte"),
        (norm, ["train/grad_norm"], "gradient norm before the clip"),
        (lr, ["train/lr"], "learning rate"),
    ]
    for axis, tags, label in panels:
        for tag in tags:
            axis.plot(*scalars[tag], linewidth=1, marker="." if tag.startswith("val") else None, label=tag)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    norm.set_yscale("log")
    loss.legend()
    for axis in (norm, lr):
        axis.set_xlabel("step")
    figure.suptitle(title)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python docs/scripts/plot_run.py RUN_FOLDER IMAGE")
    draw(read(Path(sys.argv[1])), f"recipes/{Path(sys.argv[1]).name}.yaml", Path(sys.argv[2]))
