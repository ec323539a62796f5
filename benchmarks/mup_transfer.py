"""Find the best learning rate of one small model at several widths, with muP and without, on real text.

`python -m benchmarks.mup_transfer` takes about 15 minutes on one CPU core; docs/mup.md shows what it wrote.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import machine
from benchmarks.stage_file import write
from lightning_tricks import LanguageModel, Llama, MuP, ScheduleLR, TextData, WarmupLinear, clip_grad_norm
from lightning_tricks.optim import build_optimizer

WIDTHS = (128, 256, 512)
BASE_WIDTH = WIDTHS[0]
LRS = tuple(2.0**-power for power in (11, 10, 9, 8, 7, 6))
HEAD_DIM, SEQ_LEN, ROWS, VOCABULARY = 64, 128, 4, 1024
VALIDATION_BATCHES = 16


def shape(width: int) -> Llama:
    """Two blocks, heads of one width, an MLP four times as wide as the model."""
    return Llama(VOCABULARY, width, 2, width // HEAD_DIM, max_seq_len=SEQ_LEN, activation="relu2")


def planned(widths: Sequence[int], lrs: Sequence[float], seeds: int) -> list[tuple[int, float, bool, int]]:
    """Width, learning rate, with muP, seed of each run; at the base width, muP changes nothing and runs once."""
    return [
        (width, lr, with_mup, seed)
        for seed in range(seeds)
        for width in widths
        for with_mup in (True, False)
        for lr in lrs
        if with_mup or width != BASE_WIDTH
    ]


def train(width: int, lr: float, with_mup: bool, seed: int, steps: int, data: TextData) -> dict[str, Any]:
    """Train once; the loss on held-out text at the end."""
    begin = time.perf_counter()
    torch.manual_seed(seed)
    model = LanguageModel(shape(width), mup=MuP(BASE_WIDTH) if with_mup else None)
    model.configure_model()
    optimizer = build_optimizer(model, lambda groups: torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True),
                                mup=model.mup)  # fmt: skip
    schedule = ScheduleLR(optimizer, WarmupLinear(warmup_steps=steps // 10), steps)
    rows = data.training_rows()
    for step in range(steps):
        batch = [rows[(seed * steps + step) * ROWS + row] for row in range(ROWS)]
        loss(model, torch.cat([b["input_ids"] for b in batch]), torch.cat([b["labels"] for b in batch])).backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    held_out = [batch for _, batch in zip(range(VALIDATION_BATCHES), data.val_dataloader(), strict=False)]
    with torch.no_grad():
        losses = [loss(model, batch["input_ids"], batch["labels"]).item() for batch in held_out]
    result = statistics.mean(losses)
    return {
        "width": width, "lr": lr, "mup": with_mup, "seed": seed, "steps": steps,
        "val_loss": result if math.isfinite(result) else None, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def loss(model: LanguageModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, with products in bf16 as the recipe `tiny` has them."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def best(runs: Sequence[dict[str, Any]], width: int, with_mup: bool) -> tuple[float, float]:
    """The learning rate with the lowest mean loss over the seeds, and that loss."""
    found: dict[float, list[float]] = {}
    for run in runs:
        if run["width"] == width and (run["mup"] == with_mup or width == BASE_WIDTH):
            found.setdefault(run["lr"], []).append(math.inf if run["val_loss"] is None else run["val_loss"])
    means = {lr: statistics.mean(losses) for lr, losses in found.items()}
    lr = min(means, key=lambda lr: means[lr])
    return lr, means[lr]


def shift(runs: Sequence[dict[str, Any]], widths: Sequence[int], with_mup: bool) -> float:
    """Steps of a 2x grid by which the best learning rate moves from the narrowest model to the widest."""
    return math.log2(best(runs, max(widths), with_mup)[0] / best(runs, min(widths), with_mup)[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mup_transfer", description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; default %(default)s")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="default %(default)s")
    parser.add_argument("--lrs", type=float, nargs="+", default=LRS, help="default: 2^-11 to 2^-6")
    parser.add_argument("--out", type=Path, help="JSON file; runs that it holds already are kept")
    options = parser.parse_args(arguments)
    out = options.out or Path(__file__).parent / "results" / f"mup-transfer-{machine.today()}-cpu.json"
    result: dict[str, Any] = {"machine": machine.describe(), "base_width": BASE_WIDTH, "runs": []}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    done = {(run["width"], run["lr"], run["mup"], run["seed"], run["steps"]) for run in result["runs"]}
    data = TextData(vocab_size=VOCABULARY, seq_len=SEQ_LEN, micro_batch_size=ROWS)
    data.setup("fit")
    for width, lr, with_mup, seed in planned(options.widths, options.lrs, options.seeds):
        if (width, lr, with_mup, seed, options.steps) in done:
            continue
        run = train(width, lr, with_mup, seed, options.steps, data)
        result["runs"].append(run)
        write(out, result)
        print(f"width {width:5d}  lr {lr:.5f}  {'muP' if with_mup else 'plain':5}  seed {seed}  val loss "
              f"{run['val_loss']}  {run['seconds']} s", flush=True)  # fmt: skip
    for with_mup in (True, False):
        moved = shift(result["runs"], options.widths, with_mup)
        print(f"{'with' if with_mup else 'without'} muP the best learning rate moves by {moved:+.0f} steps of 2x")


if __name__ == "__main__":
    main()
