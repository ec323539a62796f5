"""A run folder under each launcher: the processes of a run share one folder, and a resume goes on in it."""

import os
import sys
from pathlib import Path

import pytest
from harness import processes

from lightning_tricks.checkpoints import verify_checkpoint
from lightning_tricks.cli import RecipeCLI

pytestmark = pytest.mark.long

RUN = Path("runs/toy/version_0")
START = {"config.yaml", "hparams.yaml", "events"}
CHECKPOINTS = {"checkpoints/step=2.ckpt", "checkpoints/step=4.ckpt", "checkpoints/last.ckpt"}
FILES = START | CHECKPOINTS
# as `ddp_spawn` starts a process, which gets a pickle of all, without importing everything anew
SPAWN = "{class_path: DDPStrategy, init_args: {start_method: forkserver}}"


def fit(strategy: str, fails: str = "", *options: str, devices: int = 2) -> str:
    """The command line, in this process; returns the exception."""
    saver = "[{class_path: SafeCheckpoint, init_args: {every_n_train_steps: 2}}]"
    logger = "{class_path: ResumingTensorBoardLogger, init_args: {save_dir: runs, name: toy}}"
    sys.argv = ["lightning-tricks"]
    try:
        RecipeCLI(
            args=[
                "fit", "--model=cli.test_run_folder.Toy", f"--model.refuses={fails}", "--trainer.accelerator=cpu",
                f"--trainer.devices={devices}", f"--trainer.strategy={strategy}", "--trainer.max_steps=4",
                f"--trainer.logger={logger}", f"--trainer.callbacks={saver}", "--trainer.enable_progress_bar=false",
                *options,
            ]
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left() -> set[str]:
    """The files of the run, those of TensorBoard without their numbers."""
    found = (path.relative_to(RUN).as_posix() for path in RUN.rglob("*") if not path.is_dir())
    return {"events" if name.startswith("events") else name for name in found}


def forked(folder: Path) -> None:
    os.chdir(folder)
    assert fit("ddp_fork") == ""
    assert left() == FILES
    assert "refused in setup" in fit("ddp_notebook", "setup")
    assert not (RUN.with_name("version_1") / "config.yaml").exists()


def test_under_ddp_fork_a_run_has_one_folder(tmp_path):
    processes.end(processes.start_alone(forked, tmp_path))
    verify_checkpoint(tmp_path / RUN / "checkpoints/last.ckpt")


def test_under_ddp_spawn_a_run_stays_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    assert fit("auto", devices=1) == ""
    # a second fit, which goes on from the first: everything that the child is given can be pickled
    assert fit(SPAWN, "", "--ckpt_path=last", "--trainer.max_steps=6", devices=1) == ""
    assert left() == FILES - {"checkpoints/step=2.ckpt"} | {"checkpoints/step=6.ckpt"}
    verify_checkpoint(RUN / "checkpoints/last.ckpt")
