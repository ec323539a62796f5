"""From the command to the end of the first step: not compiled, compiled anew, and compiled with a cache from before.

    python -m benchmarks.cold_starts                 # 15 minutes on two cores

Each start is a process `python -m lightning_tricks fit` of one step, without callbacks, validation and logs, on one
thread. `cold` has an empty folder in `TORCHINDUCTOR_CACHE_DIR`, and `warm`, which comes next, the folder that it has
filled. Times are those of the process and of all that it has started.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

REPOSITORY = Path(__file__).resolve().parents[1]
WAYS = {"not compiled": "false", "cold": "true", "warm": "true"}
STEP = (
    "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.callbacks", "null", "--trainer.plugins",
    "null", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar",
    "false", "--model.init_args.schedule", "null",
)  # fmt: skip


def command(recipe: str, compiled: str, *options: str) -> list[str]:
    """The words that train the first step of a recipe."""
    config = str(REPOSITORY / f"recipes/{recipe}.yaml")
    words = ("--config", config, *STEP, "--model.init_args.compile_blocks", compiled, *options)
    return [sys.executable, "-m", "lightning_tricks", "fit", *words]


def start(words: list[str], folder: Path, cache: Path) -> dict[str, float]:
    """Seconds of the clock and of processors until the process has ended, and MiB of the cache then."""
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=folder, env={**os.environ, **own, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {' '.join(words)}")
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "cache_mib": size / 2**20}


def measure(recipe: str, rounds: int, *options: str) -> dict[str, list[dict[str, float]]]:
    """The starts of each way, in the order of the rounds; also for a GPU, with the recipe's own options for it."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start(command(recipe, "false", *options), folder, folder / "none")  # prepares the data, and reads files
        for number in range(rounds):
            for way, compiled in WAYS.items():
                cache = folder / ("none" if compiled == "false" else f"compiled_{number}")
                found[way].append(start(command(recipe, compiled, *options), folder, cache))
    return found


def table(result: dict[str, Any]) -> str:
    """Markdown: medians over the rounds, and in brackets the extremes."""
    lines = ["| recipe | way | seconds | CPU seconds | cache, MiB |", "|---|---|--:|--:|--:|"]
    for recipe, ways in result["recipes"].items():
        for way, starts in ways.items():
            cells = []
            for key in ("seconds", "cpu_seconds"):
                values = [each[key] for each in starts]
                cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
            lines.append(f"| {recipe} | {way} | {' | '.join(cells)} | {starts[-1]['cache_mib']:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--recipes", nargs="+", default=["tiny", "moe_tiny"], help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/cold-starts-DATE-cpu.json")
    options = parser.parse_args(arguments)
    recipes = {one: measure(one, options.rounds, "--trainer.accelerator", "cpu") for one in options.recipes}
    result = {"benchmark": "cold_starts", "machine": machine.describe(), "load_average": os.getloadavg()}
    out = options.out or REPOSITORY / f"benchmarks/results/cold-starts-{machine.today()}-cpu.json"
    out.write_text(json.dumps({**result, "recipes": recipes}, indent=1) + "\n", encoding="utf-8")
    print(f"{table({'recipes': recipes})}\n\n{out}")


if __name__ == "__main__":
    main()
