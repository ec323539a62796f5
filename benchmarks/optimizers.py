"""Try every optimizer that a recipe may name: what it costs, where it works, whether it resumes, and what it learns.

`python -m benchmarks.optimizers` takes about an hour on two CPU cores; docs/optimizers.md shows what it wrote. Parts of
rows that the file holds already are kept.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, optimizer_trials, strategy_runs
from benchmarks.memory_logger import Memory
from benchmarks.optimizer_rows import ROWS, built
from benchmarks.precision import MODEL, flag
from benchmarks.stage_file import write
from benchmarks.strategy_runs import attempt, start
from lightning_tricks import Llama
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.commands import recipes_folder
from lightning_tricks.models import Decoder

TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "d_model": 256,
    "n_heads": 4,
    "max_seq_len": 256,
    "activation": "relu2",
    "qk_norm": True,
}
BLOCKS = 60  # of the recipe's, which make 50M parameters
LEARNING_STEPS = 200
TIME_LIMIT = 1500.0  # seconds for the processes that try all rows in one place
ENOUGH_SECONDS, ROUNDS = 20.0, 3  # of the clock: as many rounds as fit, one at least
OPTIONS: dict[str, Any] = {
    "data.init_args.micro_batch_size": 8, "trainer.accelerator": "cpu", "trainer.limit_val_batches": 50,
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
        self.optimizer: Any = built(name, self.model)
        self.steps, self.estimates = 0, type(self.optimizer).__name__ == "SophiaH"
        self.gradients = [torch.randn_like(parameter) * 1e-3 for parameter in self.parameters]

    def seconds(self, steps: int) -> float:
        """CPU time of a step, mean over some, which other programs on the machine change little.

        Gradients are put back before each step, as some optimizers write to them.
        """
        total = 0.0
        for _ in range(steps):
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient.clone()
            # Sophia's curvature is given to it, as these gradients have no second derivatives: its time is not counted
            given = (
                {"hessian": self._curvature()} if self.estimates and self.steps % ROWS["SophiaH"].period == 0 else {}
            )
            self.steps += 1
            begin = time.process_time()
            self.optimizer.step(**given)
            total += time.process_time() - begin
        return total / steps

    def _curvature(self) -> list[torch.Tensor]:
        return [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]

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
    own: list[float] = []
    base: list[float] = []
    begin = time.perf_counter()
    while len(own) < ROUNDS and (not own or time.perf_counter() - begin < ENOUGH_SECONDS):
        own.append(other.seconds(period))
        base.append(adamw.seconds(max(period, 3)))
    ratios = [one / two for one, two in zip(own, base, strict=True)]
    return {
        "parameters": other.numel,
        "threads": torch.get_num_threads(),
        "state_bytes_per_parameter": round(other.state_bytes() / other.numel, 3),
        "first_step_ms": round(first * 1e3, 1),
        "step_ms": round(statistics.median(own) * 1e3, 1),
        "adamw_ms": round(statistics.median(base) * 1e3, 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def learns(name: str, folder: Path) -> dict[str, Any]:
    """Two hundred steps of the recipe `tiny` with the small model of the precision table: first and last loss."""
    row, options = ROWS[name], {**MODEL, **OPTIONS, "trainer.default_root_dir": str(folder)}
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


def tried(names: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What becomes of each optimizer in each place: as a user has it, and where that is a refusal, without it."""
    found: dict[str, dict[str, Any]] = {name: {"said": {}, "tried": {}} for name in names}
    for job, world, *strategy in (("in_one", 1), ("in_two", 2, "fsdp2"), ("in_two", 2, "deepspeed")):
        place = strategy[0] if strategy else "one"
        for kind in ("said", "tried"):
            act: Any = getattr(optimizer_trials, job)
            chosen = names if kind == "said" else [n for n in names if refuses(found[n]["said"], place)]
            for some in [chosen] if kind == "said" else [[name] for name in chosen]:
                out = folder / f"{kind}-{place}-{len(some)}-{some[0] if some else ''}".replace(" ", "_")
                (out / "runs").mkdir(parents=True)
                try:
                    ranks = start(act, world, out / "log", some, out / "runs", *strategy, kind == "tried")
                except Exception as error:  # a process that ended, or took too long
                    ranks = [{name: {place: {"failed": str(error).strip().splitlines()[-1]}} for name in some}]
                for name in some:
                    trials = {trial: joined([rank[name][trial] for rank in ranks]) for trial in ranks[0][name]}
                    found[name][kind].update(plain(trials))
    return found


def refuses(said: dict[str, Any], place: str) -> bool:
    """Whether something was refused in a place, or in one of those that one process tries."""
    places = ("one", "bf16_true", "compile", "tensor lr") if place == "one" else (place,)
    return any("refused" in said.get(each, {}) for each in places)


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first rank found, with the mean loss of all."""
    if "loss" not in ranks[0]:
        return ranks[0]
    return ranks[0] | {"loss": [statistics.mean(each) for each in zip(*(rank["loss"] for rank in ranks), strict=True)]}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Without tensors, for JSON."""
    return {key: plain(value) if isinstance(value, dict) else value for key, value in found.items() if key != "tensors"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--parts", nargs="+", default=["tried", "costs", "learns"], help="default: all three")
    parser.add_argument("--out", type=Path, help="JSON file; parts of rows that it holds already are kept")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.exit(2, f"unknown optimizer {' '.join(unknown)}: give some of {', '.join(ROWS)}\n")
    strategy_runs.TIME_LIMIT = TIME_LIMIT
    out = options.out or Path(__file__).parent / "results" / f"optimizers-{machine.today()}-cpu.json"
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": {}, "left_out": {}}
    result = {"machine": machine.describe(), **result}
    names = [name for name in options.names or ROWS if not ROWS[name].missing]
    result["left_out"] |= {name: f"needs {ROWS[name].missing}" for name in ROWS if ROWS[name].missing}
    for name in names:
        result["rows"].setdefault(name, {"optimizer": ROWS[name].optimizer, "needs": ROWS[name].needs})
    result["rows"] = {name: result["rows"][name] for name in ROWS if name in result["rows"]}
    rows = result["rows"]
    with tempfile.TemporaryDirectory() as folder:
        wanted = [name for name in names if "tried" not in rows[name]]
        if "tried" in options.parts and wanted:
            for name, found in tried(wanted, Path(folder)).items():
                rows[name]["tried"] = found
            write(out, result)
        acts: dict[str, Any] = {"learns": lambda name: learns(name, Path(folder)), "costs": costs}
        for part, act in acts.items():
            for name in names:
                if part in options.parts and part not in rows[name]:
                    rows[name][part] = attempt(partial(act, name))
                    gc.collect()
                    write(out, result)
                    print(name, part, json.dumps(rows[name][part]), flush=True)


if __name__ == "__main__":
    main()
