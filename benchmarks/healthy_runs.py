"""How many steps StepGuard skips in runs that nothing is wrong with: it should be none.

    python -m benchmarks.healthy_runs --out healthy_runs.json

A decoder of 0.2M parameters learns Python's own sources for 2,000 steps of 2,048 tokens from each of five seeds, with a
warmup and a learning rate at which it learns quickly. Each run also tells how near its steps came to the limits: the
largest distance of a loss and of a gradient norm from the mean of the last 128 steps, in standard deviations.
"""

import argparse
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from lightning_tricks import Llama, MetricBuffer, StepGuard, TextData
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.metrics.row import Row
from lightning_tricks.schedules import WarmupCosine


class Curve(pl.Callback):
    """Keeps each step's loss and gradient norm."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.norm: list[float] = []
        self.skipped = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ask the buffer."""
        MetricBuffer.of(trainer).at_flush(self._keep)

    def _keep(self, rows: list[Row]) -> dict[str, float]:
        for row in rows:
            self.loss.append(row.values["train/loss"])
            self.norm.append(row.values["train/grad_norm"])
            self.skipped += row.values["_step_guard/0/skipped"]
        return {}


def farthest(values: Sequence[float], window: int = 128, active_after: int = 64) -> float:
    """The largest distance of a value above the mean of the `window` before it, in their standard deviations."""
    distances = []
    for index in range(active_after, len(values)):
        before = torch.tensor(values[max(index - window, 0) : index], dtype=torch.float64)
        distances.append((values[index] - before.mean().item()) / before.std().item())
    return max(distances)


def run(seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Train once from a seed; the number of skipped steps, and how near the others came to the limits."""
    pl.seed_everything(seed, verbose=False)
    curve, begun = Curve(), time.perf_counter()
    model = LanguageModel(
        decoder=Llama(vocab_size=1024, d_model=64, n_layers=2, n_heads=2, max_seq_len=256),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True),
        schedule=WarmupCosine(warmup_steps=100),
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=1.0, log_every_n_steps=50, logger=False,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[StepGuard(), curve], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, datamodule=TextData(vocab_size=1024, seq_len=256, micro_batch_size=8, seed=seed))
    return {
        "seed": seed, "steps": len(curve.loss), "skipped": curve.skipped, "first_loss": round(curve.loss[0], 4),
        "last_loss": round(sum(curve.loss[-50:]) / 50, 4), "finite": all(map(math.isfinite, curve.loss)),
        "farthest_loss_sigmas": round(farthest(curve.loss), 2), "farthest_norm_sigmas": round(farthest(curve.norm), 2),
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each run; default %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs; default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/healthy-runs-DATE-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    out = options.out or Path(__file__).parent / "results" / f"healthy-runs-{machine.today()}-cpu.json"
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            runs.append(run(seed, options.steps, Path(folder)))
            print(runs[-1], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": "healthy_runs", "machine": machine.describe(), "threads": 1, "runs": runs}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
