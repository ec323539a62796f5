"""How long training waits for the first saves in the background, and for later ones.

    python -m benchmarks.first_saves          # a minute, 3 GB of memory, 1 GB of disk

Weights of 50M parameters with AdamW's state are saved five times in a row, each after the one before is on the disk:
with memory that was got ahead, as SafeCheckpoint does after the first step, and without. Each series is a process of
its own, and they take turns.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks import machine
from benchmarks.checkpoints import state
from lightning_tricks.checkpoints import AtomicCheckpointIO

SAVES = 5
_FORK = multiprocessing.get_context("fork")


def _reserved(checkpoint: dict[str, Any]) -> Any:
    io = AtomicCheckpointIO(asynchronous=True)
    io.reserve([leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor)])
    io.wait()
    return io


SERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "reserved": _reserved,
    "not_reserved": lambda _: AtomicCheckpointIO(asynchronous=True),
}
_NAMES = {
    "reserved": "`AtomicCheckpointIO(asynchronous=True)`, memory got ahead by `reserve`",
    "not_reserved": "the same without `reserve`",
}


def stalls(name: str, checkpoint: dict[str, Any], folder: Path) -> list[float]:
    """Seconds for which each save holds training up."""
    io, found = SERIES[name](checkpoint), []
    for number in range(SAVES):
        begun = time.perf_counter()
        io.save_checkpoint(checkpoint, folder / f"{number % 2}.ckpt")
        found.append(time.perf_counter() - begun)
        io.wait()
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown: medians over the rounds."""
    lines = [f"| seconds of save | {' | '.join(map(str, range(1, SAVES + 1)))} |", f"|---|{'--:|' * SAVES}"]
    for name, rounds in result["stalls"].items():
        medians = (statistics.median(values) for values in zip(*rounds, strict=True))
        lines.append(f"| {_NAMES[name]} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=5e7, help="default %(default)g")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/first-saves-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    checkpoint = state(int(options.parameters))
    found: dict[str, list[list[float]]] = {name: [] for name in SERIES}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as made:
        for number in range(options.rounds):
            names = list(SERIES)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with _FORK.Pool(1) as pool:
                    found[name].append(pool.apply(stalls, (name, checkpoint, Path(made))))
    result = {
        "benchmark": "first_saves", "machine": machine.describe(), "load_average": load,
        "parameters": int(options.parameters), "stalls": found,
    }  # fmt: skip
    out = options.out or Path(__file__).parent / "results" / f"first-saves-{machine.today()}-cpu.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result), out, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
