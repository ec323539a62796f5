"""What Python's garbage collector costs a step, and what `GCControl` changes.

    python -m benchmarks.gc_control --out gc_control.json

A small model is trained in one process on one thread, with few and with two million Python objects that live beside it,
as a data set of dictionaries has them. Each step leaves cyclic garbage behind, more of it in the second half of the
cases. Contenders take turns in each round: Python's own collector twice (how far two equal things lie apart here), and
`GCControl`. `mean` is the CPU time of a step, `longest` that of the longest step but the first ones; ratios are taken
within a round, and the table gives their median and extremes.
"""

import argparse
import gc
import itertools
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from benchmarks.feed import quietly
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import GCControl

WARMUP, STEPS = 20, 400
CONTENDERS = ("automatic", "automatic_again", "gc_control")
OBJECTS = (0, 2_000_000)  # dictionaries that live beside the model
GARBAGE = (0, 100)  # cycles that a step leaves behind


class Model(pl.LightningModule):
    """A small network; each step leaves `garbage` cycles behind, and notes the CPU time at its start."""

    def __init__(self, garbage: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.garbage = garbage
        self.stamps: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.stamps.append(time.process_time())
        for _ in range(self.garbage):
            cycle: list[Any] = []
            cycle.append(cycle)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(contender: str, garbage: int) -> tuple[float, float]:
    """Mean and longest CPU time of a step, in milliseconds."""
    module = Model(garbage)
    trainer = pl.Trainer(
        max_steps=WARMUP + STEPS + 1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[GCControl()] if contender == "gc_control" else [],
    )  # fmt: skip
    gc.collect()  # the collector counts across runs, and after a thaw it finds a full collection due
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(WARMUP + STEPS + 1, 64)), batch_size=1))
    stamps = module.stamps[WARMUP:]
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(stamps)]
    return statistics.fmean(steps), max(steps)


def ratios(times: dict[str, list[tuple[float, float]]], index: int) -> dict[str, list[float]]:
    """Median and extremes over the rounds of each contender's figure over that of `automatic`."""
    found = {}
    for name in CONTENDERS[1:]:
        pairs = zip(times[name], times["automatic"], strict=True)
        seen = sorted(own[index] / base[index] for own, base in pairs)
        found[name] = [round(value, 3) for value in (statistics.median(seen), seen[0], seen[-1])]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/gc-control-DATE-cpu.json")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: give at least 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for objects in OBJECTS:
        kept = [{"row": index} for index in range(objects)]
        for garbage in GARBAGE:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
            for number in range(options.rounds + 1):
                for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
                    with quietly():
                        figures = measure(name, garbage)
                    if number:
                        times[name].append(figures)
            milliseconds = {
                name: [round(statistics.median(figure), 3) for figure in zip(*seen, strict=True)]
                for name, seen in times.items()
            }
            rows.append({
                "objects": len(kept), "cycles_a_step": garbage, "mean_and_longest_ms": milliseconds,
                "mean_over_automatic": ratios(times, 0), "longest_over_automatic": ratios(times, 1),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        del kept
        gc.collect()
    result = {
        "benchmark": "gc_control", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "steps": STEPS, "every_n_steps": GCControl().every_n_steps, "rows": rows,
    }  # fmt: skip
    out = options.out or Path(__file__).parent / "results" / f"gc-control-{machine.today()}-cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
