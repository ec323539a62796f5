"""Whole command lines that are told to stop: the processes' exit codes, what they print, and that none is left over."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness.preloaded import left_over, python
from harness.processes import LAUNCHED, free_port, threads
from harness.token_files import write_token_files

pytestmark = pytest.mark.long

RECIPE = """
seed_everything: 0
model:
  class_path: LanguageModel
  init_args:
    decoder: {class_path: Llama, init_args: {vocab_size: 64, d_model: 16, n_layers: 1, n_heads: 2, max_seq_len: 8}}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-2}}
    schedule: {class_path: WarmupLinear, init_args: {warmup_steps: 2}}
data:
  class_path: TokenData
  init_args: {train: train.bin, vocab_size: 64, seq_len: 8, micro_batch_size: 2, num_workers: 2}
trainer:
  accelerator: cpu
  max_steps: 8
  log_every_n_steps: 1
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: ResumingCSVLogger, init_args: {save_dir: runs, name: toy}}
  callbacks:
    - {class_path: ModelCheckpoint, init_args: {every_n_train_steps: 100, save_last: true}}
    - {class_path: tells.Tells}
"""
TELLS = """
import atexit, json, os, signal, subprocess, time
from pathlib import Path
import lightning.pytorch as pl

class Tells(pl.Callback):
    '''In step 4 the processes of TELL_RANKS get a signal, or all of the run's; writes down how each one ended.'''

    def __init__(self):
        if os.environ.get("TELL_GROUP"):
            os.setpgid(0, 0)  # as a shell does for a job
            os.environ.pop("TELL_GROUP")
        if int(os.environ.get("TELL_SIGNAL", 0)):  # as torchrun does, which may see another process end first
            atexit.register(os.kill, os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        number, ranks = int(os.environ.get("TELL_SIGNAL", 0)), json.loads(os.environ.get("TELL_RANKS", "[]"))
        if batch_idx != 3 or not number:
            return
        if ranks == "launcher":
            Path("ready").touch()
            preemption = next(c for c in trainer.callbacks if type(c).__name__ == "Preemption")
            while not preemption._signals.received:
                time.sleep(0.01)
        elif ranks == "group":
            if trainer.global_rank == 0:  # from outside: a loader's workers obey their own parent
                subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgrp()}"], start_new_session=True)
        elif trainer.global_rank in ranks:
            os.kill(os.getpid(), number)

    def on_exception(self, trainer, pl_module, exception):
        Path(f"code{trainer.global_rank}").write_text(str(getattr(exception, "code", repr(exception))))
"""


def start(folder: Path, *command: str, tell: int = 0, ranks: object = (), **env: str) -> subprocess.Popen:
    """Start a command line in a folder of its own with the recipe, the data and the callback that gives the signal."""
    if not folder.exists():
        write_token_files(folder)
        (folder / "toy.yaml").write_text(RECIPE)
        (folder / "tells.py").write_text(TELLS)
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    told = {"TELL_SIGNAL": str(int(tell)), "TELL_RANKS": json.dumps(ranks)} | (
        {"TELL_GROUP": "1"} if ranks == "group" else {}
    )
    return subprocess.Popen(
        [python(), *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**inherited, "OMP_NUM_THREADS": "1", **told, **env}, start_new_session=True,
    )  # fmt: skip


FIT = ("-m", "lightning_tricks", "fit", "--config", "toy.yaml")
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


def losses(folder: Path) -> list[str]:
    lines = (folder / "runs/toy/version_0/metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    return [line.split(",")[column] for line in lines[1:]]


STOPPED = {signal.SIGTERM: 143, signal.SIGINT: 130}
OF_LIGHTNING = [(signal.SIGTERM, [0]), (signal.SIGINT, "group")]
OF_TORCHRUN = [[1], "launcher"]


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and output."""
    out = process.communicate()[0]
    return process.returncode, out


def run_alone(folder: Path, number: int) -> tuple[int, str]:
    return finish(start(folder, *FIT, tell=number, ranks=[0]))


def run_two(folder: Path, number: int, ranks: object) -> tuple[int, str]:
    return finish(start(folder, *FIT, *TWO, tell=number, ranks=ranks))


def run_torchrun(folder: Path, ranks: object) -> tuple[int, str]:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    process = start(folder, *torchrun, *FIT, *TWO, tell=signal.SIGTERM, ranks=ranks)
    if ranks == "launcher":
        while not (folder / "ready").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    return finish(process)


RUNS = {
    "unbroken": (run_alone, 0),
    "alone": (run_alone, signal.SIGTERM),
    **{f"two {number} {ranks}": (run_two, number, ranks) for number, ranks in OF_LIGHTNING},
    **{f"torchrun {ranks}": (run_torchrun, ranks) for ranks in OF_TORCHRUN},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A function that waits for the run of that name: its folder, exit code and output."""
    folders = {name: tmp_path_factory.mktemp("stopped") / "run" for name in RUNS}
    python()
    with threads({name: (run, folders[name], *args) for name, (run, *args) in RUNS.items()}) as wait:
        yield lambda name: (folders[name], *wait(name))


@pytest.fixture(scope="module")
def unbroken(ended):
    folder, code, out = ended("unbroken")
    assert code == 0, out
    return losses(folder)


def go_on(out: str) -> list[str]:
    """The command that the run has printed, without `python`."""
    (line,) = [line for line in out.splitlines() if line.startswith("Go on:")]
    python, *command = shlex.split(line.removeprefix("Go on:"))
    assert python == "python"
    return command


CHECKPOINT = ("--ckpt_path", "runs/toy/version_0/checkpoints/last.ckpt")


def test_the_command_line_stops_and_the_printed_command_goes_on(unbroken, ended):
    folder, code, out = ended("alone")
    assert code == STOPPED[signal.SIGTERM], out
    assert "Stopped by SIGTERM after step 4: " in out
    assert "Traceback" not in out
    assert [path.name for path in folder.rglob("*.ckpt")] == ["last.ckpt"]
    assert go_on(out) == [*FIT, *CHECKPOINT]
    assert left_over(folder) == []
    code, out = finish(start(folder, *go_on(out)))
    assert code == 0, out
    assert losses(folder) == unbroken


@pytest.mark.parametrize(("number", "ranks"), OF_LIGHTNING)
def test_processes_of_lightnings_launcher_leave_together(ended, number, ranks):
    folder, code, out = ended(f"two {number} {ranks}")
    assert code == STOPPED[number], out
    assert [(folder / f"code{rank}").read_text() for rank in (0, 1)] == [str(code)] * 2
    assert out.count("Stopped by") == 1
    assert f"Stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'} after step " in out
    assert go_on(out)[-2:] == [*CHECKPOINT]
    assert "failed first" not in out
    assert "Traceback" not in out
    assert [path.name for path in folder.rglob("*.ckpt")] == ["last.ckpt"]
    assert left_over(folder) == []


@pytest.mark.parametrize("ranks", OF_TORCHRUN)
def test_processes_of_torchrun_leave_together(ended, ranks):
    folder, code, out = ended(f"torchrun {ranks}")
    assert code != 0
    assert [(folder / f"code{rank}").read_text() for rank in (0, 1)] == ["143"] * 2, out
    assert out.count("Stopped by SIGTERM after step") == 1
    if ranks == [1]:
        assert out.count("exitcode  : 143") == 2, out  # of both, in torchrun's own table
    assert [path.name for path in folder.rglob("*.ckpt")] == ["last.ckpt"]
    assert left_over(folder) == []
