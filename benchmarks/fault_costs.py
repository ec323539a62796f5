"""What each callback that catches or explains faults costs a step, on a CPU, in one process.

    python -m benchmarks.fault_costs --out fault_costs.json

The recipe tiny runs with its own callbacks left out, once without any, once again without any, with one more callback
at a time, and with all of them. All these runs are under way at once, in threads of which one trains while the others
wait: each makes a few steps, then the next one has its turn. So a machine whose speed changes from second to second
changes for all of them, and each ratio is one of neighbours. `micro` is a step of a few milliseconds: the difference is
the fixed cost of a callback. `step_100ms` is a step of about 100 ms.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from benchmarks import machine
from benchmarks.contenders import run_ours
from benchmarks.feed import in_memory, load, quietly, write_tokens
from benchmarks.overhead import _MICRO, DATA, DECODER
from lightning_tricks._lightning import pl

_SMALLER = (
    f"{DECODER}.d_model", "192", f"{DECODER}.n_layers", "4", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "1024",
    f"{DATA}.vocab_size", "1024", f"{DATA}.seq_len", "128", "--trainer.plugins", "null", "--trainer.precision",
    "32-true", "--trainer.log_every_n_steps", "10",
)  # fmt: skip
SIZES = {"micro": ((*_MICRO, "50"), 64, 50), "step_100ms": (_SMALLER, 1024, 10)}  # options, vocabulary, steps in a turn


def callbacks() -> dict[str, Callable[[], list[pl.Callback]]]:
    """What runs beside the recipe, by name: nothing, each callback, all of them; GCControl would act on all threads."""
    from lightning_tricks import EMA, GoodputMonitor, HangWatchdog, RunLedger, StepGuard, TailAverage

    single: dict[str, Callable[[], pl.Callback]] = {
        "StepGuard": StepGuard,
        "StepGuard recheck": lambda: StepGuard(recheck=True),
        "RunLedger": RunLedger,
        "RunLedger all weights": lambda: RunLedger(cover_weights_in_steps=1),
        "GoodputMonitor": GoodputMonitor,
        "HangWatchdog": HangWatchdog,
        "EMA": EMA,
        "TailAverage": TailAverage,
    }
    together = ("StepGuard", "RunLedger", "GoodputMonitor", "HangWatchdog", "EMA")
    return {
        "none": list,
        "none again": list,
        **{name: partial(_made, [make]) for name, make in single.items()},
        "all": partial(_made, [single[name] for name in together]),
    }


def _made(makers: Sequence[Callable[[], pl.Callback]]) -> list[pl.Callback]:
    return [make() for make in makers]


class Turns:
    """Lets one of several threads run at a time, in a fixed order.

    Args:
        count: number of threads.
        width: steps in a turn.
    """

    def __init__(self, count: int, width: int) -> None:
        self.width = width
        self._free = [threading.Event() for _ in range(count)]
        self._ended: set[int] = set()

    def start(self) -> None:
        """Let the first thread go."""
        self._free[0].set()

    def wait(self, own: int) -> None:
        """Wait for the turn of a thread."""
        self._free[own].wait()
        self._free[own].clear()

    def next(self, own: int, ended: bool = False) -> None:
        """Give the turn to the next thread that has not ended."""
        if ended:
            self._ended.add(own)
        others = [(own + shift) % len(self._free) for shift in range(1, len(self._free) + 1)]
        for other in others:
            if other not in self._ended:
                self._free[other].set()
                return


def run_once(
    overrides: Sequence[str], added: list[pl.Callback], count: int, shards: str, folder: Path, turns: Turns, own: int
) -> list[float]:
    """Train in turns with the other runs; CPU seconds of each step."""
    seconds: list[float] = []
    last = 0.0

    def mark(index: int) -> None:
        nonlocal last
        if index:
            seconds.append(time.process_time() - last)
        if index % turns.width == 0:
            turns.next(own)
            turns.wait(own)
        last = time.process_time()

    where = ("--trainer.logger.init_args.save_dir", str(folder), "--trainer.accelerator", "cpu")
    length = ("--trainer.max_steps", str(count))
    turns.wait(own)
    try:
        cli: Any = load("tiny", shards, folder, [*overrides, *where, *length])
        cli.trainer.callbacks = [*cli.trainer.callbacks, *added]
        run_ours(cli, in_memory(cli, 32), count, mark)
    finally:
        turns.next(own, ended=True)
    return seconds


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """All runs of one size, `rounds` turns of each; the first three do not count, nor a turn's first two steps."""
    overrides, vocab_size, width = SIZES[name]
    shards = write_tokens(folder, vocab_size, 500_000)
    made = callbacks()
    turns, count = Turns(len(made), width), width * (rounds + 3)
    with quietly(), ThreadPoolExecutor(len(made)) as threads:
        futures = {
            contender: threads.submit(run_once, overrides, make(), count, shards, folder / contender, turns, own)
            for own, (contender, make) in enumerate(made.items())
        }
        turns.start()
        seconds = {contender: future.result() for contender, future in futures.items()}
    of_turns = {
        contender: [statistics.median(own[begin + 2 : begin + width]) for begin in range(3 * width, count - 1, width)]
        for contender, own in seconds.items()
    }
    base = of_turns["none"]
    return {
        contender: {
            "cpu_ms": round(1000 * statistics.median(own), 3),
            "added_cpu_us": quartiles([1e6 * (a - b) for a, b in zip(own, base, strict=True)], 1),
            "cpu_ratio": quartiles([a / b for a, b in zip(own, base, strict=True)], 4),
        }
        for contender, own in of_turns.items()
    }


def quartiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """The median of the turns, and the quarters below and above it."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, digits), "low": round(low, digits), "high": round(high, digits)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each run that count; default %(default)s")
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
            ratio = "{median:.4f} ({low:.4f} to {high:.4f})".format(**row["cpu_ratio"])
            added = "{median:+.1f} us ({low:+.1f} to {high:+.1f})".format(**row["added_cpu_us"])
            print(f"{name:<11} {contender:<22} {row['cpu_ms']:9.3f} ms  {added:<36} {ratio}")
    print(out)


if __name__ == "__main__":
    main()
