"""What each callback that catches or explains faults costs a step, on a CPU, in one process.

    python -m benchmarks.fault_costs --out fault_costs.json

The recipe tiny runs with its own callbacks left out and one of these in, and a clock of the thread's CPU time stands
around each hook of the callback, around what it lets MetricBuffer call with an interval's values, and around
StepGuard's judgement within the clip. So the cost is not a difference of two runs, which on a machine whose speed
changes from second to second is larger than the cost. What a callback makes others do, as the optimizer's kernel that
skips a step, is not in it. `micro` is a step of a few milliseconds; `step_100ms` one of about 100 ms, between whose
hooks the model's data have taken the caches. HangWatchdog is not here: it looks from a thread of its own.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from benchmarks import machine
from benchmarks.contenders import run_ours
from benchmarks.feed import in_memory, load, quietly, write_tokens
from benchmarks.overhead import _MICRO, DATA, DECODER
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.metrics.metric_buffer import MetricBuffer

Stamp = tuple[float, float]

_SMALLER = (
    f"{DECODER}.d_model", "192", f"{DECODER}.n_layers", "4", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "1024",
    f"{DATA}.vocab_size", "1024", f"{DATA}.seq_len", "128", "--trainer.plugins", "null", "--trainer.precision",
    "32-true", "--trainer.log_every_n_steps", "10",
)  # fmt: skip
SIZES = {"micro": ((*_MICRO, "50"), 64, 300), "step_100ms": (_SMALLER, 1024, 40)}  # options, vocabulary, steps


def callbacks() -> dict[str, Callable[[], pl.Callback]]:
    """Each callback, by name."""
    from lightning_tricks import EMA, GoodputMonitor, RunLedger, SpikeRollback, StepGuard, TailAverage

    return {
        "StepGuard": StepGuard,
        "RunLedger": RunLedger,
        "RunLedger all weights": lambda: RunLedger(cover_weights_in_steps=1),
        "SpikeRollback": SpikeRollback,
        "GoodputMonitor": GoodputMonitor,
        "EMA": EMA,
        "TailAverage": TailAverage,
    }


class Clock:
    """Adds up the CPU time of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added; one within another counts once."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - begin

        return timed

    @contextmanager
    def watching(self, callback: pl.Callback) -> Iterator[None]:
        """Inside the `with`, time a callback's hooks, its judgement, and what it lets the buffer call."""
        for name in [name for name in dir(pl.Callback) if name.startswith("on_")] + ["_judge"]:
            if getattr(type(callback), name, None) not in (None, getattr(pl.Callback, name, None)):
                setattr(callback, name, self.around(getattr(callback, name)))
        at_flush = MetricBuffer.at_flush

        def wrapped(own: MetricBuffer, derive: Any) -> Any:
            ours = getattr(derive, "__self__", None) is callback
            return at_flush(own, self.around(derive) if ours else derive)

        with replaced(MetricBuffer, "at_flush", wrapped):
            yield


def run_once(overrides: Sequence[str], callback: pl.Callback, count: int, shards: str, folder: Path) -> list[Stamp]:
    """Train once; the CPU seconds of each step, and of the callback in it."""
    clock, stamps = Clock(), list[Stamp]()

    def mark(index: int) -> None:
        stamps.append((time.thread_time(), clock.seconds))

    where = ("--trainer.logger.init_args.save_dir", str(folder), "--trainer.accelerator", "cpu")
    with quietly(), clock.watching(callback):
        cli: Any = load("tiny", shards, folder, [*overrides, *where])
        cli.trainer.callbacks = [*cli.trainer.callbacks, callback]
        run_ours(cli, in_memory(cli, 32), count, mark)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(stamps)]


def measure(name: str, chosen: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Each callback in `rounds` runs, all of them in turn; the first quarter of each run does not count."""
    overrides, vocab_size, count = SIZES[name]
    shards = write_tokens(folder, vocab_size, 500_000)
    makers = {contender: make for contender, make in callbacks().items() if contender in chosen}
    found: dict[str, list[Stamp]] = {contender: [] for contender in makers}
    for number in range(rounds):
        for contender, make in makers.items():
            steps = run_once(overrides, make(), count, shards, folder / f"{contender} {number}")
            found[contender] += steps[count // 4 :]
        print(f"{name}: round {number + 1} of {rounds} done", flush=True)
    return {
        contender: {
            "step_ms": round(1e3 * statistics.median(whole for whole, _ in steps), 3),
            "us_median": round(1e6 * statistics.median(own for _, own in steps), 1),
            "us_mean": round(1e6 * statistics.fmean(own for _, own in steps), 1),
            "share_of_step": round(sum(own for _, own in steps) / sum(whole for whole, _ in steps), 5),
        }
        for contender, steps in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="default %(default)s")
    parser.add_argument("--callbacks", default=",".join(callbacks()), help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each; default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/fault-costs-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result: dict[str, Any] = {"benchmark": "fault_costs", "machine": machine.describe(), "threads": 1, "sizes": {}}
    out = options.out or Path(__file__).parent / "results" / f"fault-costs-{machine.today()}-cpu.json"
    for name in options.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result["sizes"][name] = measure(name, options.callbacks.split(","), options.rounds, Path(folder))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, figures in result["sizes"].items():
        for contender, row in figures.items():
            line = "{step_ms:9.3f} ms a step, {us_median:9.1f} us (mean {us_mean:.1f}), {share_of_step:.3%}"
            print(f"{name:<11} {contender:<22} {line.format(**row)}")
    print(out)


if __name__ == "__main__":
    main()
