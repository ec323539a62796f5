"""A small recipe with a warmup, a stable part and a decay, through the real command line: for branches and decays."""

import csv
import re
from pathlib import Path
from typing import Any

import torch
from harness.token_files import write_token_files

from lightning_tricks import __main__ as door

RECIPE = """
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 64, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 8}}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-2}}
    schedule: {class_path: WarmupStableDecay, init_args: {warmup_steps: 3, decay_steps: 3}}
    param_rules:
      - pattern: head
        schedule: {class_path: WarmupStableDecay, init_args: {warmup_steps: 3, decay_steps: 2, decay_shape: linear}}
        decay_schedule: {class_path: WarmupStableDecay, init_args: {warmup_steps: 0, decay_steps: 2, min_ratio: 0.5}}
data:
  class_path: TokenData
  init_args: {train: train.bin, val: val.bin, vocab_size: 64, seq_len: 8, micro_batch_size: 2}
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 12
  log_every_n_steps: 2
  num_sanity_val_steps: 0
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: toy}}
  callbacks:
    - {class_path: MFUMonitor, init_args: {peak_flops: 1.0e+12}}
    - {class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2, keep_last: 50}}
"""


def prepare(folder: Path) -> None:
    """Write the recipe and its data."""
    write_token_files(folder)
    (folder / "toy.yaml").write_text(RECIPE)


def command(name: str, *args: str) -> None:
    """A command on the recipe, in this process."""
    door.run([name, "--config", "toy.yaml", *args])


def one_piece(name: str, start: int, steps: int, *args: str) -> None:
    """The run from scratch whose decay of so many steps starts at `start`, in `runs/NAME`."""
    Path("whole.yaml").write_text(re.sub(r"decay_steps: \d", f"decay_start: {start}", RECIPE))
    length = ["--trainer.max_steps", str(start + steps)]
    door.run(["fit", "--config", "whole.yaml", "--trainer.logger.name", name, *length, *args])


def newest(name: str) -> Path:
    """The newest folder of the runs of a name."""
    return max(Path("runs", name).glob("version_*"), key=lambda path: int(path.name.split("_")[1]))


def saved(run: Path, step: int) -> dict[str, Any]:
    """The checkpoint of a step."""
    checkpoint: dict[str, Any] = torch.load(run / f"checkpoints/step={step}.ckpt", weights_only=True)
    return checkpoint


def logged(run: Path, column: str) -> dict[int, float]:
    """A metric by its step."""
    with (run / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def assert_equal(run: Path, other: Path, start: int, end: int) -> None:
    """Two runs have the same losses, learning rates and validation from `start` on, and end with the same state."""
    for column in ("train/loss", "train/lr", "val/loss"):
        one, two = ({step: x for step, x in logged(each, column).items() if step >= start} for each in (run, other))
        assert one == two, column
        assert one, column
    one, two = saved(run, end), saved(other, end)
    assert one["global_step"] == two["global_step"] == end
    assert one["state_dict"].keys() == two["state_dict"].keys()
    assert all(torch.equal(one["state_dict"][name], two["state_dict"][name]) for name in one["state_dict"])
    assert str(one["optimizer_states"]) == str(two["optimizer_states"])
    assert str(one["random_states"]) == str(two["random_states"])
