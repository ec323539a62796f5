"""The tiny recipe at toy width, as a user runs it: train, run again, evaluate, be killed, and go on.

The runs are forked from a server that has imported everything (`preloaded`).
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from harness.preloaded import python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_tricks.commands import recipes_folder

pytestmark = pytest.mark.long

TOY = {
    "model.init_args.decoder.init_args.d_model": 32,
    "model.init_args.decoder.init_args.n_layers": 1,
    "model.init_args.decoder.init_args.vocab_size": 300,
    "model.init_args.decoder.init_args.max_seq_len": 32,
    "model.init_args.schedule.init_args.warmup_steps": 2,
    "data.init_args.vocab_size": 300,
    "data.init_args.seq_len": 32,
    "data.init_args.micro_batch_size": 4,
    "data.init_args.cache_dir": "cache",
    "trainer.max_steps": 40,
    "trainer.log_every_n_steps": 10,
    "trainer.val_check_interval": 40,
    "trainer.limit_val_batches": 20,
    "trainer.limit_test_batches": 20,
    # the second list replaces the recipe's: checkpoints every 8 steps, no baseline
    "trainer.callbacks": "[{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 8, save_last: link}}]",
}


def arguments(command: str, files: str, **overrides: object) -> list[str]:
    config = TOY | {"data.init_args.files": files} | {k.replace("__", "."): v for k, v in overrides.items()}
    recipe = str(recipes_folder() / "tiny.yaml")
    return [
        "-m", "lightning_tricks", command, "--config", recipe,
        *(f"--{key}={value}" for key, value in config.items()),
    ]  # fmt: skip


def run(folder: Path, *args, **overrides) -> str:
    command = [python(), *arguments(*args, **overrides)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


LAST = "runs/tiny/version_0/checkpoints/last.ckpt"


def weights(folder: Path, last: str = LAST) -> dict[str, torch.Tensor]:
    return torch.load(folder / last, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(folder, "fit", text_file)


def test_a_run_prints_its_progress_its_figures_and_what_to_do_next(trained):
    _, out = trained
    values = r"loss \d.*  norm \d.*  lr \S+  \S+ tokens/s  MFU [\d.]+%  ETA \d:\d\d:\d\d"
    lines = re.findall(rf"step (\d+)/40 \(\d+%\)  {values}", out)
    assert lines == ["10", "20", "30", "40"]
    assert re.search(r"step 40  validation  loss [\d.]+  bits/byte [\d.]+", out)
    for next_step in ("TensorBoard: tensorboard --logdir runs/tiny", "Evaluate: ", "Go on: "):
        assert next_step in out
    assert "training and" in out  # the data's summary
    assert "no_decay" in out  # the table of the groups
    losses = [float(value) for value in re.findall(r"step \d+/40 .*?loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 0.5


def test_a_second_run_has_a_folder_of_its_own_and_ends_with_the_same_weights(trained, text_file):
    folder, _ = trained
    run(folder, "fit", text_file)
    again = weights(folder, LAST.replace("version_0", "version_1"))
    assert all(torch.equal(again[name], value) for name, value in weights(folder).items())
    assert (folder / "runs/tiny/version_1/config.yaml").is_file()


def test_evaluation_repeats_the_training_runs_figure(trained, text_file):
    folder, out = trained
    found = re.search(r"bits/byte ([\d.]+)", out)[1]
    table = run(folder, "validate", text_file, ckpt_path=LAST)
    row = next(line for line in table.splitlines() if "val/bits_per_byte" in line)
    assert f"{float(re.search(r'([0-9.]+)[^0-9]*$', row)[1]):.4f}" == found


def test_killed_in_mid_run_it_goes_on_to_the_same_weights(trained, tmp_path, text_file):
    whole, _ = trained
    killed = "[{class_path: harness.runs.Fail, init_args: {rank: 0, step: 13}}]"  # when ten steps have been logged
    done = subprocess.run(
        [python(), *arguments("fit", text_file), f"--trainer.callbacks+={killed}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 8
    run(tmp_path, "validate", text_file, ckpt_path=LAST)
    out = run(tmp_path, "fit", text_file, ckpt_path="last")
    assert re.findall(r"step (\d+)/40", out)[0] == "10"
    expected = weights(whole)
    assert all(torch.equal(expected[name], value) for name, value in weights(tmp_path).items())
    assert sorted(path.name for path in (tmp_path / "runs/tiny").glob("version_*")) == ["version_0"]
    curve = EventAccumulator(str(tmp_path / "runs/tiny/version_0"), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in curve.Scalars("train/grad_norm")] == list(range(40))  # each step once
