"""The training stages of gpu.py: tokens/s and peak memory of a recipe, beside other loops or in other formats.

Runs in a process of its own: `python -m benchmarks.gpu_train RECIPE --out FILE`. The JSON is written after every
single measurement, so that a timeout loses only what was not measured yet.
"""

import argparse
import dataclasses
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.feed import load, own_loader, write_tokens
from benchmarks.formats import on_gpu
from benchmarks.gpu_checks import require_device, write
from lightning_tricks.accounting import matmul_parameters, training_flops_per_token

DECODER, DATA = "--model.init_args.decoder.init_args", "--data.init_args"


@dataclasses.dataclass(frozen=True)
class Size:
    """One recipe at full size: micro-batches until everything is compiled and allocated, then those that are timed.

    Both are whole optimizer steps. `rounds` repeats all contenders in one process, each round in another order.
    `recipe` is that of the stage's name where none is given.
    """

    warmup: int
    timed: int
    rounds: int
    overrides: tuple[str, ...] = ()
    recipe: str = ""


# Estimates on an H200 at half its peak: a run of gpt2_124m 4 s, of llama1b 14 s, of llama7b_1gpu 14 s, each and once
# for each process with 15 to 40 s of start and compilation.
SIZES = {
    "gpt2_124m": Size(warmup=8, timed=16, rounds=3),
    "llama1b": Size(warmup=8, timed=16, rounds=2),
    # Two such models do not fit, so gpu.py gives each contender a process. The recipe accumulates 64 micro-batches.
    "llama7b_1gpu": Size(warmup=4, timed=8, rounds=1, overrides=("--trainer.accumulate_grad_batches", "4")),
    "precision_124m": Size(warmup=8, timed=16, rounds=2, recipe="gpt2_124m"),
    "fsdp2_124m": Size(warmup=8, timed=16, rounds=3, recipe="gpt2_124m"),
    "fsdp2_1b": Size(warmup=8, timed=16, rounds=2, recipe="llama1b"),
    "precision_1b": Size(warmup=4, timed=8, rounds=2, overrides=("--trainer.accumulate_grad_batches", "4"),
                         recipe="llama1b"),
    # The layers of the 7B model, eight of its 32, so that several formats fit on 80 GB; 16,384 tokens a micro-batch.
    "precision_7b": Size(warmup=4, timed=8, rounds=2, recipe="llama7b_1gpu", overrides=(
        f"{DECODER}.n_layers", "8", f"{DATA}.micro_batch_size", "4", "--trainer.accumulate_grad_batches", "4",
        "--model.init_args.activation_checkpointing", "none",
    )),
}  # fmt: skip
# One device as it is, and the same through FSDP2: what the strategy costs where there is nothing to shard.
STRATEGIES = {
    "one_device": ("--trainer.strategy", "auto"),
    "fsdp2": ("--trainer.strategy", json.dumps({"class_path": "FSDP2Strategy"})),
}
_DRY = (
    f"{DECODER}.d_model", "32", f"{DECODER}.n_layers", "2", f"{DECODER}.n_heads", "4", f"{DECODER}.vocab_size", "256",
    f"{DECODER}.d_ff", "64", f"{DECODER}.n_kv_heads", "2", f"{DECODER}.max_seq_len", "32",
    f"{DATA}.vocab_size", "256", f"{DATA}.seq_len", "32", f"{DATA}.micro_batch_size", "2", f"{DATA}.num_workers", "0",
    "--model.init_args.compile_blocks", "false", "--trainer.accumulate_grad_batches", "2",
)  # fmt: skip


def toy(size: Size) -> Size:
    """The same in a second on a CPU."""
    overrides = (*size.overrides, *_DRY, "--trainer.accelerator", "cpu")
    return dataclasses.replace(size, warmup=2, timed=4, rounds=max(size.rounds - 1, 1), overrides=overrides)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process: while the clock runs there should be no new one."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def run_once(name: str, size: Size, contender: str, shards: str, folder: Path, device: str) -> dict[str, Any]:
    """Train a recipe for a few steps and time the last of them, from one synchronisation to the next."""
    cuda = device == "cuda"
    moments: dict[int, float] = {}
    graphs: dict[int, int] = {}

    def mark(index: int) -> None:
        if index not in (size.warmup, size.warmup + size.timed):
            return
        if cuda:
            torch.cuda.synchronize()
            if index == size.warmup:
                torch.cuda.reset_peak_memory_stats()
        moments[index], graphs[index] = time.perf_counter(), compiled_graphs()

    start, graphs_before = time.perf_counter(), compiled_graphs()
    variants = {**on_gpu(dry=device == "cpu"), **STRATEGIES}
    cli: Any = load(size.recipe or name, shards, folder, (*size.overrides, *variants.get(contender, ())))
    # Here everyone reads through the data module, as there is time to do so while the device works.
    run = CONTENDERS["ours_loader" if contender == "ours" or contender in variants else contender]
    run(cli, own_loader(cli), size.warmup + size.timed, mark)
    seconds = moments[size.warmup + size.timed] - moments[size.warmup]
    data, config = cli.datamodule, cli.model.config
    tokens = size.timed * data.micro_batch_size * data.seq_len
    return {
        "contender": contender,
        "tokens_per_second": tokens / seconds,
        "micro_batch_ms": 1000 * seconds / size.timed,
        "warmup_seconds": moments[size.warmup] - start,
        "graphs_compiled_in_warmup": graphs[size.warmup] - graphs_before,
        "graphs_compiled_while_timed": graphs[size.warmup + size.timed] - graphs[size.warmup],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "seq_len": data.seq_len,
        "micro_batch_size": data.micro_batch_size,
        "accumulate_grad_batches": cli.trainer.accumulate_grad_batches,
        "precision": str(cli.trainer.precision),
        "peak_dtype": getattr(cli.trainer.precision_plugin, "peak_dtype", None) or "bf16",  # emulated fp8 has none
        "last_loss": last(cli, "train/loss"),
        "last_grad_norm": last(cli, "train/grad_norm"),
        "converted_share": getattr(cli.trainer.precision_plugin, "converted_share", None),
        "activation_checkpointing": cli.model.activation_checkpointing,
        "compile_blocks": cli.model.compile_blocks,
        "matmul_parameters": matmul_parameters(config),
        "flops_per_token": {kind: training_flops_per_token(config, data.seq_len, kind) for kind in ("causal", "full")},
    }


def last(cli: Any, name: str) -> float | None:
    """The value of a metric at the last log step; None where the contender logs none."""
    value = cli.trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def train(name: str, out: Path, dry: bool, contenders: list[str], seconds: float) -> None:
    """Measure a recipe with each contender, round by round, as long as another run is likely to fit in `seconds`.

    Args:
        name: of the recipe.
        out: result file; runs of an earlier process in it are kept.
        dry: toy sizes on the CPU.
        contenders: in the order of the first round, which each later round rotates.
        seconds: how long this process may take.
    """
    end, longest = time.perf_counter() + seconds, 0.0
    size = toy(SIZES[name]) if dry else SIZES[name]
    result: dict[str, Any] = {"stage": name, "machine": machine.describe(), "runs": []}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        shards = write_tokens(Path(folder), 256 if dry else 32000, 100_000 if dry else 20_000_000)
        for number in range(size.rounds):
            for place in range(len(contenders)):
                contender = contenders[(place + number) % len(contenders)]
                start = time.perf_counter()
                if start + longest > end:
                    print(f"{name}: no time for round {number + 1}, {contender}")
                    return
                print(f"== {name}, round {number + 1}, {contender}", flush=True)
                run = run_once(name, size, contender, shards, Path(folder), "cpu" if dry else "cuda")
                result["runs"].append({"round": number, **run})
                write(out, result)
                gc.collect()  # a Trainer and its module hold each other
                if not dry:
                    torch.cuda.empty_cache()
                longest = max(longest, time.perf_counter() - start)


def main() -> None:
    """Command line, for gpu.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=SIZES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--contenders", default="ours,bare,stock")
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    require_device(options.dry)
    train(options.stage, options.out, options.dry, options.contenders.split(","), options.seconds)


if __name__ == "__main__":
    main()
