"""Train one small model in every number format on real text, and write down its losses and validation bits/byte.

`python -m benchmarks.precision` takes an hour or more on one CPU core; docs/precision.md shows what it wrote.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.feed import RECIPES
from benchmarks.formats import formats
from benchmarks.memory_logger import Memory
from benchmarks.stage_file import write
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.cli import RecipeCLI

PEAK_LR, SMALL_LR, NORMAL_LR, LARGE_LR = 2e-3, 3e-5, 3e-4, 3e-3
# Each format at the recipe's learning rate; what rounding does to small updates; what a ten times larger rate does.
AT_SMALL_LR = ("fp32", "bf16_mixed", "bf16_true_naive", "bf16_true_stochastic")
OTHER_LRS = {SMALL_LR: AT_SMALL_LR, NORMAL_LR: ("bf16_mixed",), LARGE_LR: ("bf16_mixed",)}
# Without fp16 instructions a CPU multiplies fp16 thirteen times slower than fp32: a quarter of the steps there, with
# fp32 over the same quarter beside it.
SHORTER_ON_CPU = ("fp16", "fp16_unscaled")
POINTS = 100  # of the loss curve that is kept

MODEL = {
    "model.init_args.decoder.init_args": {
        "vocab_size": 1024, "d_model": 128, "n_layers": 4, "n_heads": 4, "max_seq_len": 128, "activation": "swiglu",
        "d_ff": 384, "qk_norm": False, "zero_init_outputs": False,
    },
    "model.init_args.param_rules": None,
    "data.init_args.vocab_size": 1024,
    "data.init_args.seq_len": 128,
}  # fmt: skip


class Frozen(pl.Callback):
    """Share of the matrices' weights that end training where they began, to the bit."""

    share = math.nan

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.before = [w.detach().clone() for w in matrices(pl_module)]

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        pairs = list(zip(self.before, matrices(pl_module), strict=True))
        same = sum(int((old == new).sum()) for old, new in pairs)
        self.share = same / sum(old.numel() for old, _ in pairs)


def matrices(module: torch.nn.Module) -> Iterable[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]


def load(options: Sequence[str], device: str, steps: int, folder: Path) -> RecipeCLI:
    """The tiny recipe with the small model, validated once, at its end."""
    common: dict[str, Any] = {
        **MODEL,
        "model.init_args.compile_blocks": device == "cuda",
        "trainer.accelerator": "gpu" if device == "cuda" else "cpu",
        "trainer.devices": 1,
        "model.init_args.schedule.init_args.warmup_steps": steps // 10,
        "trainer.max_steps": steps,
        "trainer.val_check_interval": steps,
        "trainer.limit_val_batches": min(100, steps),
        "trainer.num_sanity_val_steps": 0,
        "trainer.log_every_n_steps": 10,
        "trainer.callbacks": [],
        "trainer.logger": False,
        "trainer.enable_checkpointing": False,
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
        "trainer.default_root_dir": str(folder),
    }
    flags = [text for name, value in common.items() for text in flag(name, value)]
    argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns where both are given
    try:
        arguments = ["--config", str(RECIPES / "tiny.yaml"), *flags, *options]
        return RecipeCLI(run=False, save_config_callback=None, args=arguments)
    finally:
        sys.argv = argv


def flag(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in flag(f"{name}.{key}", inner)]
    return [f"--{name}", json.dumps(value) if not isinstance(value, str) else value]


def run_once(name: str, options: Sequence[str], lr: float, device: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train once; the loss curve, validation bits/byte at the end, and shares of frozen weights and clipped steps."""
    lr_option = ("--model.init_args.optimizer.init_args.lr", str(lr))
    torch._dynamo.reset()  # each format has graphs of its own, and past a limit torch would go on eagerly
    before = compiled_graphs()
    trained: Any = load([*options, *lr_option], device, steps, folder)
    memory, frozen, trainer = Memory(), Frozen(), trained.trainer
    trainer.loggers = [memory]
    trainer.callbacks = [frozen, *trainer.callbacks]
    trainer.fit(trained.model, datamodule=trained.datamodule)
    loss, norms = memory.series["train/loss"], memory.series["train/grad_norm"]
    window = max(len(loss) // POINTS, 1)
    plugin = trainer.precision_plugin
    return {
        "format": name,
        "lr": lr,
        "steps": len(loss),
        "bits_per_byte": memory.series["val/bits_per_byte"][-1],
        "last_loss": statistics.mean(loss[-50:]),
        "frozen_share": frozen.share,
        "clipped_share": sum(norm > trainer.gradient_clip_val for norm in norms) / len(norms),
        "skipped_steps": getattr(plugin, "skipped_steps", None),
        "converted_share": getattr(plugin, "converted_share", None),
        "graphs": compiled_graphs() - before,
        "loss": [round(statistics.mean(loss[i : i + window]), 4) for i in range(0, len(loss), window)],
    }


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def planned(chosen: Sequence[str], device: str, steps: int, only_peak_lr: bool) -> list[tuple[str, float, int]]:
    """Format, learning rate and steps of each run, in the order of `chosen`."""
    short = steps // 4 if device == "cpu" else steps
    runs = [(name, PEAK_LR, short if name in SHORTER_ON_CPU else steps) for name in chosen]
    if "fp32" in chosen and any(name in chosen for name in SHORTER_ON_CPU) and short < steps:
        runs.append(("fp32", PEAK_LR, short))
    others = [(name, lr, steps) for lr, names in OTHER_LRS.items() for name in names if name in chosen]
    return runs if only_peak_lr else runs + others


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("formats", nargs="*", help=f"of {' '.join(formats(True))}; default: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--only_peak_lr", action="store_true", help=f"nothing but lr {PEAK_LR}")
    parser.add_argument("--out", type=Path, help="JSON file; runs that it holds already are kept")
    options = parser.parse_args(arguments)
    known = formats(emulate=options.device == "cpu")
    if unknown := [name for name in options.formats if name not in known]:
        parser.error(f"unknown format {' '.join(unknown)}: give some of {' '.join(known)}")
    default = Path(__file__).parent / "results" / f"precision-{machine.today()}-{options.device}.json"
    out = options.out or default
    result: dict[str, Any] = {"machine": machine.describe(), "steps": options.steps, "model": MODEL, "runs": []}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    done = {(run["format"], run["lr"], run["steps"]) for run in result["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        for name, lr, steps in planned(
            options.formats or list(known), options.device, options.steps, options.only_peak_lr
        ):
            if (name, lr, steps) in done:
                continue
            with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
                run = run_once(name, known[name], lr, options.device, steps, Path(folder))
            result["runs"].append(run)
            write(out, result)
            print(f"{name:32} lr {lr:.0e}  {run['bits_per_byte']:.4f} bits/byte  frozen {run['frozen_share']:.1%}")
            gc.collect()  # a Trainer and its module hold each other


if __name__ == "__main__":
    main()
