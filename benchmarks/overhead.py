"""What Lightning and our modules cost on top of a bare training loop, on a CPU, in one process.

    python -m benchmarks.overhead --sizes micro,tiny --out overhead.json

Rounds are interleaved and shuffled, and each ratio is taken within its round, so that a machine that slows down slows
all contenders down. Each figure is the median over windows of `log_every_n_steps` steps: what a step costs with its
share of the logging.
"""

import argparse
import dataclasses
import gc
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: the recipes would take a GPU

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import in_memory, load, quietly, write_tokens

Stamp = tuple[float, float]  # wall and CPU seconds, the latter of all threads: a logger writes in its own
DECODER, DATA = "--model.init_args.decoder.init_args", "--data.init_args"


@dataclasses.dataclass(frozen=True)
class Size:
    """One model, and how long it is run: `warmup` steps, then `steps` that count."""

    recipe: str
    steps: int
    warmup: int
    contenders: tuple[str, ...]
    overrides: tuple[str, ...] = ()


# A step so small that little but the overhead is left of it: about a millisecond in the bare loop, in fp32.
_MICRO = (
    f"{DECODER}.d_model", "32", f"{DECODER}.n_layers", "1", f"{DECODER}.n_heads", "2", f"{DECODER}.vocab_size", "64",
    f"{DATA}.vocab_size", "64", f"{DATA}.seq_len", "16", f"{DATA}.micro_batch_size", "1",
    "--trainer.plugins", "null", "--trainer.precision", "32-true", "--trainer.log_every_n_steps",
)  # fmt: skip
_WATCHED = ("stock_watched", "ours", "ours_watched")
_FEW = ("bare", "bare_again", "stock", "ours_loader", "ours_watched")

SIZES = {
    "micro": Size("tiny", 400, 100, tuple(CONTENDERS), (*_MICRO, "50")),  # 50: Lightning's default
    "micro_log_every_step": Size("tiny", 200, 50, ("bare", "stock", *_WATCHED), (*_MICRO, "1")),
    "tiny": Size("tiny", 20, 5, _FEW),
    "small": Size("small", 10, 2, _FEW),
}


def windows(stamps: Sequence[Stamp], width: int) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds a step, each the mean over `width` steps in a row; a shorter rest is left out."""
    pairs = [(stamps[i], stamps[i + width]) for i in range(0, len(stamps) - width, width)]
    return [(b[0] - a[0]) / width for a, b in pairs], [(b[1] - a[1]) / width for a, b in pairs]


def ratios(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Quotients of `own` and `base` round by round: median, extremes and every round."""
    rounds = [a / b for a, b in zip(own, base, strict=True)]
    return {
        "median": round(statistics.median(rounds), 4),
        "min": round(min(rounds), 4),
        "max": round(max(rounds), 4),
        "rounds": [round(value, 4) for value in rounds],
    }


def run_once(size: Size, contender: str, shards: str, folder: Path) -> tuple[float, float, str]:
    """Train once; median wall and CPU seconds a step, and the precision that was used."""
    common = (
        "--trainer.logger.init_args.save_dir", str(folder / "logs"), "--trainer.accelerator", "cpu",
        "--model.init_args.compile_blocks", "false",  # the hand-written loops take `auto` for true
    )  # fmt: skip
    stamps: list[Stamp] = []

    def mark(index: int) -> None:
        stamps.append((time.perf_counter(), time.process_time()))

    with quietly():
        cli: Any = load(size.recipe, shards, folder, [*size.overrides, *common])
        batches = in_memory(cli, 32)
        gc.collect()
        CONTENDERS[contender](cli, batches, size.warmup + size.steps, mark)
    width = min(cli.trainer.log_every_n_steps, size.steps)
    wall, cpu = windows(stamps[size.warmup :], width)
    return statistics.median(wall), statistics.median(cpu), str(cli.trainer.precision)


def measure(name: str, size: Size, rounds: int, folder: Path) -> dict[str, Any]:
    """All contenders of one size, `rounds` times after one round that does not count."""
    shards = write_tokens(folder, 64 if name.startswith("micro") else 4096, 1_000_000)
    wall: dict[str, list[float]] = {contender: [] for contender in size.contenders}
    cpu: dict[str, list[float]] = {contender: [] for contender in size.contenders}
    precision = ""
    for number in range(rounds + 1):
        order = random.Random(number).sample(size.contenders, len(size.contenders))
        for contender in order:
            wall_seconds, cpu_seconds, precision = run_once(size, contender, shards, folder)
            if number:
                wall[contender].append(wall_seconds)
                cpu[contender].append(cpu_seconds)
        print(f"{name}: round {number} of {rounds} done", flush=True)
    figures = {
        contender: {
            "wall_ms": round(1000 * statistics.median(wall[contender]), 3),
            "cpu_ms": round(1000 * statistics.median(cpu[contender]), 3),
            "wall_ratio": ratios(wall[contender], wall["bare"]),
            "cpu_ratio": ratios(cpu[contender], cpu["bare"]),
        }
        for contender in size.contenders
    }
    return {**dataclasses.asdict(size), "rounds": rounds, "precision": precision, "figures": figures}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, ratios with their extremes over the rounds."""
    lines = [
        "| size | contender | wall ms/step | CPU ms/step | wall / bare | CPU / bare |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, size in result["sizes"].items():
        for contender, row in size["figures"].items():
            spread = ["{median:.3f} ({min:.3f} to {max:.3f})".format(**row[k]) for k in ("wall_ratio", "cpu_ratio")]
            lines.append(
                f"| {name} | {contender} | {row['wall_ms']:.3f} | {row['cpu_ms']:.3f} | {' | '.join(spread)} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="micro,tiny", help=f"of {','.join(SIZES)}; default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="that count; default %(default)s")
    parser.add_argument("--steps", type=int, help="that count in each run; default: as many as fit the size")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/overhead-DATE-cpu.json")
    options = parser.parse_args(arguments)
    names = options.sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        parser.error(f"--sizes {','.join(unknown)}: give some of {','.join(SIZES)}")
    if options.rounds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--rounds and --steps: give at least 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result: dict[str, Any] = {"benchmark": "overhead", "machine": machine.describe(), "threads": 1, "sizes": {}}
    out = options.out or Path(__file__).parent / "results" / f"overhead-{machine.today()}-cpu.json"
    for name in names:
        size = dataclasses.replace(SIZES[name], **({"steps": options.steps} if options.steps else {}))
        with tempfile.TemporaryDirectory() as folder:
            result["sizes"][name] = measure(name, size, options.rounds, Path(folder))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # after each size: a kill keeps the rest
    print(f"\n{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
