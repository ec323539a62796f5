"""Try every optimizer that a recipe may name: what it costs, where it works, whether it resumes, and what it learns.

`python -m benchmarks.optimizers` takes about an hour on two CPU cores; docs/optimizers.md shows what it wrote. Rows that
the file holds already are kept.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, optimizer_trials
from benchmarks.memory_logger import Memory
from benchmarks.optimizer_rows import ROWS, built
from benchmarks.precision import flag
from benchmarks.stage_file import write
from benchmarks.strategy_runs import attempt, start
from lightning_tricks import Llama
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.commands.recipes import recipes_folder
from lightning_tricks.models import Decoder

TINY = {"vocab_size": 4096, "d_model": 256, "n_heads": 4, "max_seq_len": 256, "activation": "relu2", "qk_norm": True}
BLOCKS = 60  # of the recipe's, which make 50M parameters
LEARNING_STEPS = 200
ENOUGH_SECONDS, ROUNDS = 20.0, 3  # of the clock: as many rounds as fit, one at least
OPTIONS: dict[str, Any] = {
    "trainer.max_steps": LEARNING_STEPS, "trainer.val_check_interval": LEARNING_STEPS, "trainer.callbacks": [],
    "trainer.logger": False, "trainer.enable_checkpointing": False, "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False, "trainer.num_sanity_val_steps": 0,
}  # fmt: skip


class Stepped:
    """A model of 50M parameters with gradients, and the clock around its optimizer's steps."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = Decoder(Llama(n_layers=BLOCKS, **TINY))
        self.parameters = list(self.model.parameters())
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = built(name, self.model)
        self.gradients = [torch.randn_like(parameter) * 1e-3 for parameter in self.parameters]

    def seconds(self, steps: int) -> float:
        """Time of a step, mean over some; gradients are put back before each, as some optimizers write to them."""
        total = 0.0
        for _ in range(steps):
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient.clone()
            begin = time.perf_counter()
            self.optimizer.step()
            total += time.perf_counter() - begin
        return total / steps

    def state_bytes(self) -> int:
        """Of the optimizer's state, after a step."""
        tensors = optimizer_trials.tensors_of(list(self.optimizer.state.values()))
        return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def costs(name: str) -> dict[str, Any]:
    """Bytes and time of a step, in turns with AdamW; the time is over whole periods."""
    adamw, period = Stepped("AdamW"), ROWS[name].period
    adamw.seconds(2)
    other = Stepped(name)
    first = other.seconds(1)
    other.seconds(1)
    own, base, begin = [], [], time.perf_counter()
    while len(own) < ROUNDS and (not own or time.perf_counter() - begin < ENOUGH_SECONDS):
        own.append(other.seconds(period))
        base.append(adamw.seconds(max(period, 3)))
    ratios = [one / two for one, two in zip(own, base, strict=True)]
    return {
        "parameters": other.numel,
        "state_bytes_per_parameter": round(other.state_bytes() / other.numel, 3),
        "first_step_ms": round(first * 1e3, 1),
        "step_ms": round(statistics.median(own) * 1e3, 1),
        "adamw_ms": round(statistics.median(base) * 1e3, 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def learns(name: str, folder: Path) -> dict[str, Any]:
    """Two hundred steps of the recipe `tiny`: the first loss, the last ones, and bits per byte."""
    row, options = ROWS[name], {**OPTIONS, "trainer.default_root_dir": str(folder)}
    flags = [text for option, value in options.items() for text in flag(option, value)]
    chosen = ["--model.init_args.optimizer", json.dumps(row.optimizer)]
    model = [] if row.module is ROWS["AdamW"].module else ["--model", f"{row.module.__module__}.{row.module.__name__}"]
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns where both are given
    try:
        recipe = ["--config", str(recipes_folder() / "tiny.yaml")]
        cli: Any = RecipeCLI(run=False, save_config_callback=None, args=[*recipe, *flags, *model, *chosen])
    finally:
        sys.argv = argv
    memory = Memory()
    cli.trainer.loggers = [memory]
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    loss = memory.series["train/loss"]
    return {
        "steps": len(loss),
        "first_loss": round(loss[0], 4),
        "last_loss": round(statistics.mean(loss[-20:]), 4),
        "bits_per_byte": round(memory.series["val/bits_per_byte"][-1], 4),
    }


def tried(name: str, folder: Path) -> dict[str, Any]:
    """What becomes of the optimizer in each place: as a user has it, and without our refusals."""
    found: dict[str, Any] = {}
    for kind in ("said", "tried"):
        here = folder / kind / name.replace(" ", "_")
        here.mkdir(parents=True)
        bare = kind == "tried"
        for job, world, *more in (("in_one", 1), ("in_two", 2, "fsdp2"), ("in_two", 2, "deepspeed")):
            act: Any = getattr(optimizer_trials, job)
            place = more[0] if more else "one"
            call = (optimizer_trials.without_refusals, world, here / place, act, name, here, *more)
            given = call if bare else (act, world, here / place, name, here, *more)
            ranks = attempt(lambda given=given: start(*given))  # type: ignore[misc]
            rank = joined(ranks) if isinstance(ranks, list) else ranks
            found.setdefault(kind, {}).update(plain(rank) if place == "one" else {place: plain(rank)})
    return found


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first rank found, with the mean loss of all."""
    if "loss" not in ranks[0]:
        return ranks[0]
    return ranks[0] | {"loss": [statistics.mean(each) for each in zip(*(rank["loss"] for rank in ranks), strict=True)]}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Without tensors, for JSON."""
    return {key: plain(value) if isinstance(value, dict) else value for key, value in found.items() if key != "tensors"}


def measure(name: str, folder: Path, parts: Sequence[str]) -> dict[str, Any]:
    """The parts of a row."""
    acts = {
        "tried": lambda: tried(name, folder),
        "costs": lambda: costs(name),
        "learns": lambda: learns(name, folder),
    }
    found = {}
    for part in parts:
        found[part] = attempt(acts[part])
        gc.collect()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--parts", nargs="+", default=["tried", "costs", "learns"], help="default: all three")
    parser.add_argument("--out", type=Path, help="JSON file; parts of rows that it holds already are kept")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.exit(2, f"unknown optimizer {' '.join(unknown)}: give some of {', '.join(ROWS)}\n")
    out = options.out or Path(__file__).parent / "results" / f"optimizers-{machine.today()}-cpu.json"
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": {}, "left_out": {}}
    result = {"machine": machine.describe(), **result}
    for name in options.names or ROWS:
        if ROWS[name].missing:
            result["left_out"][name] = f"needs {ROWS[name].missing}"
            continue
        row = result["rows"].setdefault(name, {"optimizer": ROWS[name].optimizer, "needs": ROWS[name].needs})
        wanted = [part for part in options.parts if part not in row]
        with tempfile.TemporaryDirectory() as folder:
            row.update(measure(name, Path(folder), wanted))
        write(out, result)
        print(name, *(f"{part}: {json.dumps(row[part])[:300]}" for part in wanted), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
