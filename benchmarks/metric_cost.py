"""What one more metric costs a step: `self.log` of stock Lightning against the buffer that our monitors share.

    python -m benchmarks.metric_cost --out metric_cost.json

Both log to TensorBoard under Lightning's default of `log_every_n_steps=50`; ours writes every step's value, stock
Lightning each fiftieth. Runs with few and with many metrics alternate; the difference, divided by how many more there
were, is the cost. A figure is that of the fastest window of 50 steps in all rounds: a small difference drowns in what
else a machine does. `fixed` is what the first metric brings along: the buffer's own share of a step.
"""

import argparse
import itertools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from benchmarks.feed import quietly
from benchmarks.overhead import windows
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import MetricBuffer
from lightning_tricks.loggers import ResumingTensorBoardLogger

EVERY, WARMUP, STEPS = 50, 50, 300
NUMBERS = (0, 5, 25)  # metrics a step


class Metrics(pl.LightningModule):
    """A model of five weights that logs `number` values a step."""

    def __init__(self, number: int, buffered: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.names = [f"train/metric_{index:02d}" for index in range(number)]
        self.buffered = buffered
        self.stamps: list[tuple[float, float]] = []

    def setup(self, stage: str) -> None:
        self.buffer = MetricBuffer.of(self.trainer) if self.buffered and self.names else None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.stamps.append((time.perf_counter(), time.process_time()))
        loss = self.layer(batch[0]).mean()
        value = loss.detach()
        for name in self.names:
            if self.buffer is None:
                self.log(name, value)
            else:
                self.buffer.record(name, value)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def microseconds(number: int, buffered: bool, folder: str) -> float:
    """CPU time of a step, of all threads, in microseconds: the fastest window of `EVERY` steps."""
    module = Metrics(number, buffered)
    kind: Any = ResumingTensorBoardLogger if buffered else TensorBoardLogger
    trainer = pl.Trainer(
        max_steps=WARMUP + STEPS + 1, accelerator="cpu", log_every_n_steps=EVERY, logger=kind(folder),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(WARMUP + STEPS + 1, 4)), batch_size=1))
    return 1e6 * min(windows(module.stamps[WARMUP:], EVERY)[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/metric-cost-DATE-cpu.json")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: give at least 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cases = list(itertools.product((False, True), NUMBERS))
    times: dict[tuple[bool, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for case in cases if number % 2 else reversed(cases):
                with quietly():
                    step = microseconds(case[1], case[0], folder)
                if number:
                    times[case].append(step)
    few, many = NUMBERS[1:]
    best = {case: min(seen) for case, seen in times.items()}
    costs = {buffered: (best[buffered, many] - best[buffered, few]) / (many - few) for buffered in (False, True)}
    result = {
        "benchmark": "metric_cost", "machine": machine.describe(), "threads": 1, "rounds": options.rounds,
        "self_log_us": round(costs[False], 2), "buffer_us": round(costs[True], 2),
        "self_log_over_buffer": round(costs[False] / costs[True], 1),
        "buffer_fixed_us": round(best[True, few] - best[True, 0] - few * costs[True], 1),
        "step_us": {
            f"{'buffer' if buffered else 'self.log'}, {number}": [round(value, 1) for value in seen]
            for (buffered, number), seen in times.items()
        },
    }  # fmt: skip
    out = options.out or Path(__file__).parent / "results" / f"metric-cost-{machine.today()}-cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))


if __name__ == "__main__":
    main()
