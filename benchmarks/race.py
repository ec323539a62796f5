"""What is each trick worth, at equal processor time, on a task that anyone repeats on a laptop?

    python -m benchmarks.race --list            # the arms, their options, and the processor time of a run of each
    python -m benchmarks.race polar_express     # one row of the table: the trick, its base and AdamW, two seeds each
    python -m benchmarks.race --stage finals    # a stage; what its result file holds already is kept

Each arm is a recipe of recipes/race and options on top of it, on Python's own sources. An arm gets as many steps as its
base does in the same processor time, by the ratio of `--stage costs`, which runs the two by turns. Both have the same
seeds: the same first weights, as far as the shapes are equal, and the same batches.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.race_arms import ARMS, DEPTHS, FINALS, REFERENCE, SCREENED, TUNED
from benchmarks.stage_file import write
from lightning_tricks import RecipeCLI
from lightning_tricks._trainer.lightning import pl

ROOT = Path(__file__).absolute().parents[1]
OUT = ROOT / "benchmarks/results/race-2026-11-28-cpu.json"
FINAL, SCREEN = 2400, 600  # steps of the base
WARMUP = 0.04  # of the run
SEEDS = {  # reported on others than tuned on
    "tune": (0,), "tune_long": (0,), "screen": (1, 2), "depth": (1,), "finals": (11, 12, 13)
}  # fmt: skip


class Clock(pl.Callback):
    """Processor seconds of each training step, bits per byte of each validation, and what is copied at the end."""

    last: "Clock"

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bits: dict[int, float] = {}
        self.copied: float | None = None
        Clock.last = self

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin a step."""
        self.begin = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """End it."""
        self.seconds.append(time.process_time() - self.begin)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Note what was measured, with the number of steps."""
        if not trainer.sanity_checking:
            self.bits[trainer.global_step] = trainer.callback_metrics["val/bits_per_byte"].item()

    @torch.no_grad()
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Nats by which 64 random tokens are easier at their second time: what heads that copy bring."""
        if (decoder := getattr(pl_module, "decoder", None)) is not None:
            generator = torch.Generator().manual_seed(0)
            length = min(64, trainer.datamodule.seq_len // 2)
            ids = torch.randint(decoder.config.vocab_size, (16, length), generator=generator).repeat(1, 2)
            logits = pl_module(ids[:, :-1]).float().transpose(1, 2)
            nats = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
            self.copied = (nats[:, : length - 1].mean() - nats[:, length:].mean()).item()


def fit(name: str, seed: int, steps: int, validate: bool = True) -> Clock:
    """Train an arm once, by the command line."""
    arm = ARMS[name]
    settings: dict[str, Any] = {
        "seed_everything": seed, "data.seed": seed,
        "trainer.max_steps": steps, "trainer.val_check_interval": steps // 2, "trainer.num_sanity_val_steps": 0,
        "trainer.enable_checkpointing": "false", "trainer.logger": "false", "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false", **arm.options,
    }  # fmt: skip
    if arm.recipe != "stock":
        settings.setdefault("model.schedule.warmup_steps", max(round(WARMUP * steps), 1))
    if not validate:
        settings["trainer.limit_val_batches"] = 0
    recipe = ROOT / f"recipes/race/{arm.recipe}.yaml"
    with tempfile.TemporaryDirectory() as folder, machine.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings["trainer.default_root_dir"] = folder
        text = lambda value: str(value).replace("STEPS*9/10", str(steps * 9 // 10)).replace("STEPS/5", str(steps // 5))  # noqa: E731
        words = [word for option, value in settings.items() for word in (f"--{option}", text(value))]
        RecipeCLI(args=["fit", "--config", str(recipe), *words, "--trainer.callbacks+", "benchmarks.race.Clock"])
    return sys.modules["benchmarks.race"].Clock.last


def ratio_of(name: str, out: Path) -> float:
    """Processor time of an arm's step over that of a step of AdamW's arm; measured where the result file has none."""
    arm = ARMS[name]
    if arm.same_cost:
        return 1.0 if arm.base is None else ratio_of(arm.base, out)
    found = [run["ratio"] for run in read(out) if run["stage"] == "costs" and run["arm"] == name]
    if not found:
        append(out, line := measure_cost(name))
        found = [line["ratio"]]
    return statistics.median(found)


def measure_cost(name: str, rounds: int = 2, steps: int = 30) -> dict[str, Any]:
    """The ratio of one arm, by turns with AdamW's."""
    ratios = []
    for number in range(rounds):
        order = (name, REFERENCE) if number % 2 else (REFERENCE, name)
        each = {arm: statistics.median(fit(arm, 0, steps, validate=False).seconds[5:]) for arm in order}
        ratios.append(each[name] / each[REFERENCE])
    return {"stage": "costs", "arm": name, "ratio": round(statistics.median(ratios), 4), "ratios": ratios}


def run(stage: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train an arm, and tell how it ended."""
    clock = fit(name, seed, steps)
    assert list(clock.bits)[1:] == [steps], f"{name}: validated at {list(clock.bits)} of {steps} steps"
    return {
        "stage": stage, "arm": name, "recipe": ARMS[name].recipe, "options": ARMS[name].options, "seed": seed,
        "steps": steps, "bits_per_byte": list(clock.bits.values()), "at_steps": list(clock.bits),
        "step_seconds": round(statistics.median(clock.seconds), 4), "seconds": round(sum(clock.seconds), 1),
        "copied_nats": clock.copied, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
    }  # fmt: skip


def planned(stage: str, names: Sequence[str]) -> Iterator[tuple[str, int, float]]:
    """Arm, seed and steps of AdamW of each run of a stage; bases of arms are run too, but where rates are tuned."""
    length = FINAL if stage in ("finals", "tune_long") else SCREEN
    bases = [] if stage in ("tune", "depth") else [REFERENCE, *(base for name in names if (base := ARMS[name].base))]
    for seed in SEEDS[stage]:
        for name in dict.fromkeys([*bases, *names]):
            yield name, seed, length * ARMS[name].share


def read(path: Path) -> list[dict[str, Any]]:
    """The runs in a result file."""
    return list(json.loads(path.read_text(encoding="utf-8"))["runs"]) if path.exists() else []


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a run to a result file, which several processes may do at once."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)  # locked itself: processes may differ in TMPDIR
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        result = {"machine": machine.describe(), "runs": []}
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
        write(path, {**result, "runs": [*result["runs"], line]})
    finally:
        os.close(folder)


def main() -> None:
    """Run what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", help="names; each brings its base along; default: all of the stage")
    parser.add_argument("--stage", choices=["costs", *SEEDS], default="screen")
    parser.add_argument(
        "--part", default="0/1", help="1/2: each second run, from the second on, for two processes at once"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--list", action="store_true", help="print the arms, and the options of each")
    options = parser.parse_args()
    if unknown := [name for name in options.arms if name not in ARMS]:
        parser.error(f"{unknown[0]} is no arm: see --list")
    if options.list:
        for name, arm in ARMS.items():
            print(f"{name:22} {arm.what} | recipes/race/{arm.recipe}.yaml {dict(arm.options) or ''}")
        return
    of_stage = {
        "tune": TUNED, "tune_long": TUNED, "screen": SCREENED, "depth": DEPTHS, "finals": FINALS, "costs": ARMS
    }[options.stage]  # fmt: skip
    names = options.arms or [name for name in of_stage if options.stage != "costs" or not ARMS[name].same_cost]
    number, parts = map(int, options.part.split("/"))
    torch.set_num_threads(1)
    if options.stage == "costs":
        for name in names:
            append(options.out, line := measure_cost(name))
            print(json.dumps(line), flush=True)
        return
    for name, seed, length in list(planned(options.stage, names))[number::parts]:
        if any((r["stage"], r["arm"], r.get("seed")) == (options.stage, name, seed) for r in read(options.out)):
            continue
        line = run(options.stage, name, seed, 2 * round(length / 2 / ratio_of(name, options.out)))
        append(options.out, line)
        print(name, seed, line["steps"], line["bits_per_byte"], line["step_seconds"], flush=True)


if __name__ == "__main__":
    from benchmarks.race import main as of_module

    of_module()
