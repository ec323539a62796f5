"""Does `branch` say what its decay ends at? Decays off one run of the race, each forecast from an earlier one.

    python -m benchmarks.branch_forecast        # about 8 minutes of one core

The first decay of a trunk has no forecast. Each later one has that of the trunk's log and of the decays before it.
"""

import argparse
import contextlib
import io
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks import __main__ as program
from lightning_tricks.logs.run import read_run

RECIPE = Path(__file__).parents[1] / "recipes/race/adamw.yaml"
STARTS = {400: 100, 800: 200, 1200: 120, 1600: 400}  # steps of each decay by its first one
EVERY = 20  # steps from a validation to the next
_LINE = re.compile(r"^Forecast: (\S+) \((\S+) to (\S+)\) .* lower by (\S+),|^No forecast.*", re.MULTILINE)


def run(command: str, *words: str, more: Sequence[str] = ()) -> str:
    """What a command of the collection prints on a recipe of the race that has a stable phase."""
    saver = f"{{class_path: SafeCheckpoint, init_args: {{every_n_train_steps: {min(STARTS)}, keep_last: 9}}}}"
    options = [
        "--model.schedule", "WarmupConstant" if command == "fit" else "WarmupStableDecay",
        "--model.schedule.warmup_steps", str(EVERY), "--trainer.val_check_interval", str(EVERY),
        "--trainer.limit_val_batches", "20", "--trainer.num_sanity_val_steps", "0", "--trainer.log_every_n_steps", "10",
        "--trainer.enable_progress_bar", "false", "--trainer.callbacks", f"[{saver}]",
        "--trainer.logger", "{class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: race}}",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        program.run([command, "--config", str(RECIPE), *options, *more, *words])
    return printed.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/branch-forecast-DATE-cpu.json")
    options, more = parser.parse_known_args(arguments)
    out = options.out or Path(__file__).parent / f"results/branch-forecast-{machine.today()}-cpu.json"
    out = out.resolve()
    result: dict[str, Any] = {"benchmark": "branch_forecast", "machine": machine.describe(), "branches": []}
    torch.set_num_threads(1)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run("fit", "--trainer.max_steps", str(max(STARTS)), more=more)
            for number, (start, steps) in enumerate(STARTS.items(), 1):
                trunk = f"runs/race/version_0/checkpoints/step={start}.ckpt"
                printed = run("branch", "--ckpt_path", trunk, "--decay_steps", str(steps), more=more)
                line = _LINE.search(printed)
                loss, low, high, gain = map(float, line.groups()) if line and line[1] else [None] * 4
                found = read_run(Path(f"runs/race/version_{number}")).val_loss
                result["branches"].append({"start": start, "steps": steps, "line": line and line[0], "forecast": loss,
                                           "low": low, "high": high, "gain": gain, "loss": found})  # fmt: skip
                write(out, result)
                print(result["branches"][-1], flush=True)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
