"""What a command costs in two checkouts: the first step of a run, a plan, and the steps of a run, in CPU seconds.

    python -m benchmarks.start_up ../old . --rounds 3

Checkouts take turns, in a new order each round, and each ratio is taken within its round. CPU seconds are those of all
processes of a command, as the system counts them: other programs lengthen them little. Each command has one thread.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.stage_file import write

_TINY = (
    "fit", "--config", "recipes/tiny.yaml", "--model.init_args.schedule", "null", "--trainer.limit_val_batches", "0",
    "--trainer.max_steps",
)  # fmt: skip
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
MORE = 20  # steps of `steps` than of `first_step`
# Of each case the command, and variables of its environment.
CASES: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "plan": (("plan", "--config", "recipes/llama7b.yaml"), {}),
    "first_step": ((*_TINY, "1"), {}),
    "steps": ((*_TINY, str(1 + MORE)), {}),
    "first_step_avx2": ((*_TINY, "1"), _AVX2),
    "steps_avx2": ((*_TINY, str(1 + MORE)), _AVX2),
}


def seconds_of(tree: Path, command: Sequence[str], variables: dict[str, str]) -> float:
    """CPU seconds of a command of the checkout `tree`, its children's too."""
    command = [str(tree / word) if word.startswith("recipes/") else word for word in command]
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_tricks", *command],
            cwd=folder, env={**os.environ, **own, **variables}, stdout=nowhere, stderr=nowhere,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{tree}: {' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime


def summary(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Of each case the median seconds in both checkouts, those of the second over those of the first, and all rounds.

    `steps` are of a longer run than `first_step` of the same round: what is left is divided by the steps more.
    """
    rows = {}
    for name, several in found.items():
        if name.startswith("steps"):
            first = found[name.replace("steps", "first_step")]
            several = [
                [(m - o) / MORE for m, o in zip(*pair, strict=True)] for pair in zip(several, first, strict=True)
            ]
        rows[name] = {
            "seconds": [round(statistics.median(one[tree] for one in several), 4) for tree in (0, 1)],
            "ratio": round(statistics.median(one[1] / one[0] for one in several), 3),
            "rounds": [[round(value, 4) for value in one] for one in several],
        }
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout")
    parser.add_argument("new", type=Path, help="checkout")
    parser.add_argument("--cases", default=",".join(CASES), help="default %(default)s; steps need first_step")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/start-up-DATE-cpu.json")
    options = parser.parse_args(arguments)
    trees = [options.old.resolve(), options.new.resolve()]
    commits = [machine.commit(tree) for tree in trees]
    names, found = options.cases.split(","), dict[str, list[list[float]]]()
    out = options.out or Path(__file__).parent / "results" / f"start-up-{machine.today()}-cpu.json"
    result: dict[str, Any] = {"benchmark": "start_up", "machine": machine.describe(), "commits": commits}
    for number in range(options.rounds):
        for name in names:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            seconds = {tree: seconds_of(trees[tree], *CASES[name]) for tree in order}
            found.setdefault(name, []).append([seconds[0], seconds[1]])
            print(f"{name}: {seconds[0]:.2f} s, {seconds[1]:.2f} s", flush=True)
        write(out, {**result, "cases": summary(found)})  # after each round: a kill keeps the others
    print(out)


if __name__ == "__main__":
    main()
