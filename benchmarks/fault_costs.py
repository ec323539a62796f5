"""What each callback that catches or explains faults costs a step, on a CPU, in one process.

    python -m benchmarks.fault_costs --out fault_costs.json

The recipe tiny runs with its own callbacks left out, then with one more callback at a time, then with all of them.
Rounds are interleaved and shuffled; each ratio is taken within its round. `micro` is a step of a few milliseconds, the
difference is the fixed cost of a callback; `step_100ms` is a model whose step takes about 100 ms.
"""

import argparse
import gc
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from benchmarks import machine
from benchmarks.contenders import run_ours
from benchmarks.feed import in_memory, load, quietly, write_tokens
from benchmarks.overhead import _MICRO, DATA, DECODER, Stamp, ratios, windows
from lightning_tricks._lightning import pl

_SMALLER = (
    f"{DECODER}.d_model", "192", f"{DECODER}.n_layers", "4", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "1024",
    f"{DATA}.vocab_size", "1024", f"{DATA}.seq_len", "128", "--trainer.plugins", "null", "--trainer.precision",
    "32-true", "--trainer.log_every_n_steps", "10",
)  # fmt: skip
SIZES = {"micro": ((*_MICRO, "50"), 64, 300, 100), "step_100ms": (_SMALLER, 1024, 40, 10)}


def callbacks() -> dict[str, Callable[[], list[pl.Callback]]]:
    """What runs beside the recipe, by name: nothing, each callback, all of them."""
    from lightning_tricks import EMA, GCControl, GoodputMonitor, HangWatchdog, RunLedger, StepGuard, TailAverage

    single: dict[str, Callable[[], pl.Callback]] = {
        "StepGuard": StepGuard,
        "StepGuard recheck": lambda: StepGuard(recheck=True),
        "RunLedger": RunLedger,
        "RunLedger all weights": lambda: RunLedger(cover_weights_in_steps=1),
        "GoodputMonitor": GoodputMonitor,
        "HangWatchdog": HangWatchdog,
        "GCControl": GCControl,
        "EMA": EMA,
        "TailAverage": TailAverage,
    }
    together = ("StepGuard", "RunLedger", "GoodputMonitor", "HangWatchdog", "GCControl", "EMA")
    return {
        "none": list,
        "none again": list,
        **{name: partial(_made, [make]) for name, make in single.items()},
        "all": partial(_made, [single[name] for name in together]),
    }


def _made(makers: Sequence[Callable[[], pl.Callback]]) -> list[pl.Callback]:
    return [make() for make in makers]


def run_once(overrides: Sequence[str], added: list[pl.Callback], count: int, shards: str, folder: Path) -> list[Stamp]:
    """Train once; a stamp of wall and CPU seconds before each step."""
    stamps: list[Stamp] = []

    def mark(index: int) -> None:
        stamps.append((time.perf_counter(), time.process_time()))

    where = ("--trainer.logger.init_args.save_dir", str(folder / "logs"), "--trainer.accelerator", "cpu")
    with quietly():
        cli: Any = load("tiny", shards, folder, [*overrides, *where])
        cli.trainer.callbacks = [*cli.trainer.callbacks, *added]
        batches = in_memory(cli, 32)
        gc.collect()
        run_ours(cli, batches, count, mark)
    return stamps


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """All contenders of one size, `rounds` times after one round that does not count."""
    overrides, vocab_size, steps, warmup = SIZES[name]
    shards = write_tokens(folder, vocab_size, 500_000)
    contenders = callbacks()
    cpu: dict[str, list[float]] = {contender: [] for contender in contenders}
    wall: dict[str, list[float]] = {contender: [] for contender in contenders}
    width = 50 if name == "micro" else 10
    for number in range(rounds + 1):
        for contender in random.Random(number).sample(list(contenders), len(contenders)):
            stamps = run_once(overrides, contenders[contender](), warmup + steps, shards, folder)
            of_wall, of_cpu = windows(stamps[warmup:], width)
            if number:
                wall[contender].append(statistics.median(of_wall))
                cpu[contender].append(statistics.median(of_cpu))
        print(f"{name}: round {number} of {rounds} done", flush=True)
    base = cpu["none"]
    return {
        contender: {
            "wall_ms": round(1000 * statistics.median(wall[contender]), 3),
            "cpu_ms": round(1000 * statistics.median(cpu[contender]), 3),
            "added_cpu_us": round(1e6 * statistics.median(a - b for a, b in zip(cpu[contender], base, strict=True)), 1),
            "cpu_ratio": ratios(cpu[contender], base),
        }
        for contender in contenders
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="that count; default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/fault-costs-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result: dict[str, Any] = {"benchmark": "fault_costs", "machine": machine.describe(), "threads": 1, "sizes": {}}
    out = options.out or Path(__file__).parent / "results" / f"fault-costs-{machine.today()}-cpu.json"
    for name in options.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result["sizes"][name] = measure(name, options.rounds, Path(folder))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, figures in result["sizes"].items():
        for contender, row in figures.items():
            ratio = "{median:.4f} ({min:.3f} to {max:.3f})".format(**row["cpu_ratio"])
            print(f"{name:<11} {contender:<22} {row['cpu_ms']:9.3f} ms  {row['added_cpu_us']:+9.1f} us  {ratio}")
    print(out)


if __name__ == "__main__":
    main()
