"""What does `compare` say of real runs: other seeds of one recipe, a learning rate three times as high, a small change?

    python -m benchmarks.compare_trials                 # 23 runs of 20 seconds, more on a busy machine
    python -m benchmarks.compare_trials --keep folder   # and keep their logs

Each run is `fit` of recipes/tiny.yaml with a smaller model on Python's own sources. The runs with equal settings and
eight seeds also tell how often `compare` would see a difference where there is none: all ways to divide them in two.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.doctor_trials import text
from lightning_tricks import RecipeCLI
from lightning_tricks.commands.compare import record, verdicts
from lightning_tricks.logs.compared_run import ComparedRun, read_runs
from lightning_tricks.logs.comparison import Comparison, compare_runs

RECIPE = Path(__file__).absolute().parents[1] / "recipes/tiny.yaml"
STEPS, LR = 200, 1e-3
DECODER = "{class_path: Llama, init_args: {vocab_size: 512, d_model: 64, n_layers: 2, n_heads: 2, max_seq_len: 64}}"
LOGGER = "{class_path: ResumingCSVLogger, init_args: {save_dir: FOLDER, name: KIND, version: seed_SEED}}"


class Kind(NamedTuple):
    """Runs of one recipe.

    Args:
        what: its difference from the first kind, in words.
        lr: peak of the learning rate.
        seeds: of the weights.
        data_seed: of the order of the rows; None for that of the weights.
    """

    what: str
    lr: float
    seeds: tuple[int, ...]
    data_seed: int | None = None


KINDS = {
    "base": Kind("nothing", LR, (0, 1, 2)),
    "lr3": Kind("learning rate x 3", 3 * LR, tuple(range(8))),
    "lr9": Kind("learning rate x 9", 9 * LR, (0, 1, 2)),
    "lr3_5": Kind("learning rate x 3.15", 1.05 * (3 * LR), tuple(range(8))),
    "weights": Kind("learning rate x 3, another seed of the weights alone", 3 * LR, (100,), data_seed=0),
}

SAME = "lr3"  # of which eight seeds were run


def _runs(kinds: str, seeds: Sequence[int]) -> list[tuple[str, int]]:
    return [(kind, seed) for kind in kinds.split() for seed in seeds]


CASES: dict[str, tuple[list[tuple[str, int]], dict[str, Any]]] = {  # runs, and options of `compare_runs`
    "two seeds of one recipe": (_runs("base", (0, 1)), {}),
    "lr 0.001 and x 3, one run each": (_runs("base lr3", (0,)), {}),
    "lr 0.001 and x 3, two seeds and one": ([*_runs("base", (0, 1)), ("lr3", 0)], {}),
    "lr 0.001 and x 3, two seeds each": (_runs("base lr3", (0, 1)), {}),
    "lr 0.001 and x 3, three seeds each": (_runs("base lr3", (0, 1, 2)), {}),
    "lr 0.003 and x 3, three seeds each": (_runs("lr3 lr9", (0, 1, 2)), {}),
    "lr 0.003 and x 1.05, three seeds each": (_runs("lr3 lr3_5", (0, 1, 2)), {}),
    "lr 0.003 and x 1.05, eight seeds each": (_runs("lr3 lr3_5", range(8)), {}),
    "lr 0.003, the same batches from other first weights": ([("lr3", 0), ("weights", 100)], {"by": "runs"}),
}


def train(folder: Path, source: Path, kind: str, seed: int, steps: int = STEPS) -> None:
    """Make one run, by the command line."""
    spec = KINDS[kind]
    logger = LOGGER.replace("FOLDER", str(folder)).replace("KIND", kind).replace("SEED", str(seed))
    settings = {
        "seed_everything": seed,
        "model.decoder": DECODER,
        "model.compile_blocks": "false",
        "model.param_rules": "[]",
        "model.optimizer.lr": spec.lr,
        "model.schedule.warmup_steps": max(steps // 10, 1),
        "data.files": source,
        "data.cache_dir": source.parent / "cache",
        "data.vocab_size": 512,
        "data.seq_len": 64,
        "data.seed": seed if spec.data_seed is None else spec.data_seed,
        "trainer.max_steps": steps,
        "trainer.val_check_interval": max(steps // 10, 1),
        "trainer.limit_val_batches": 16,
        "trainer.num_sanity_val_steps": 0,
        "trainer.plugins": "null",
        "trainer.callbacks": "[GoodputMonitor]",
        "trainer.enable_checkpointing": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.logger": logger,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    RecipeCLI(args=["fit", "--config", str(RECIPE), *words])


def compared(folder: Path, runs: Sequence[tuple[str, int]], **options: Any) -> Comparison:
    """The comparison of some of the runs."""
    found, _ = read_runs([str(folder / kind / f"seed_{seed}") for kind, seed in runs], {})
    return compare_runs(found, **options)


def false_positives(runs: Sequence[ComparedRun], each: int) -> dict[str, int]:
    """All ways to take two groups of `each` runs with equal settings, and in how many a difference would be shown."""
    ways = shown = 0
    for first in itertools.combinations(range(len(runs)), each):
        for second in itertools.combinations(sorted(set(range(len(runs))) - set(first)), each):
            if second < first:
                continue  # the same two groups
            groups = [replace(runs[i], argument=int(i in second)) for i in (*first, *second)]
            ways += 1
            shown += compare_runs(groups, "folders").verdict(1) in ("better", "worse")
    return {"seeds": each, "ways": ways, "shown": shown}


def judge(folder: Path, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said in each case, with its figures."""
    rows = []
    for name, (runs, options) in cases.items():
        found = compared(folder, runs, **options)
        said = record(found, [])
        row = next(row for row in said["rows"] if row["name"] == said["at"])
        rows.append({"case": name, "lines": verdicts(found), "verdicts": said["verdicts"], "row": row})
    return rows


def table(result: dict[str, Any]) -> str:
    """What was said in each case, and how often a difference would be seen where there is none, in Markdown."""
    lines = ["| runs | what `compare` says |", "|---|---|"]
    lines += [f"| {row['case']} | {' '.join(row['lines'])} |" for row in result["cases"]]
    counts = "; ".join(
        f"of {row['ways']} ways to take {row['seeds']} and {row['seeds']} of them, {row['shown']} show a difference"
        for row in result["false_positives"]
    )
    described = result["machine"]
    seeds = len(KINDS[SAME].seeds)
    said = (
        f"{seeds} runs of one recipe, as if some of them were of another: {counts}. Measured {described['date'][:10]} "
        f"by `python -m benchmarks.compare_trials` on a CPU with {described['cores']} cores, one thread, torch "
        f"{described['versions']['torch']}."
    )
    return "\n".join([*lines, "", textwrap.fill(said, 120, break_on_hyphens=False)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the logs; runs that it has are not made again")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/compare-trials-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep = None if options.keep is None else options.keep.absolute()
    out = (
        options.out.absolute()
        if options.out
        else Path(__file__).absolute().parent / "results" / f"compare-trials-{machine.today()}-cpu.json"
    )
    result: dict[str, Any] = {
        "benchmark": "compare_trials",
        "machine": machine.describe(),
        "steps": STEPS,
        "seconds": {},
    }
    if keep is not None and keep.is_dir() and out.is_file():
        result["seconds"] = json.loads(out.read_text(encoding="utf-8"))["seconds"]
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # so that settings on file name no other folder
        folder, source = Path("runs"), text(Path())
        if keep is not None and keep.is_dir():
            shutil.copytree(keep, folder)
        for kind, spec in KINDS.items():
            for seed in spec.seeds:
                if (folder / kind / f"seed_{seed}").is_dir():
                    continue
                begun = time.perf_counter()
                with machine.quiet():
                    train(folder, source, kind, seed)
                result["seconds"][f"{kind} {seed}"] = round(time.perf_counter() - begun, 1)
                print(kind, seed, result["seconds"][f"{kind} {seed}"], flush=True)
        result["cases"] = judge(folder, CASES)
        runs, _ = read_runs([str(folder / SAME / f"seed_{seed}") for seed in KINDS[SAME].seeds], {})
        result["false_positives"] = [false_positives(runs, each) for each in (2, 3, 4)]
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result), str(out), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
