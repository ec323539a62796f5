"""A run folder under each launcher: a finished run stays, and after an exception what the promise of RunFolder says.

The promise: the process that made the folder removes it when the command fails before that process has seen a batch,
and only while nothing lies in it but the files that a start writes; where training runs in other processes, only while
it is empty.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from cli.test_run_folder import Toy
from harness import processes

from lightning_tricks.checkpoints import verify_checkpoint
from lightning_tricks.cli import RecipeCLI
from lightning_tricks.cli.run_folder import RunFolder

RUN = Path("runs/toy/version_0")
START = {"config.yaml", "hparams.yaml", "events"}
CHECKPOINTS = {"checkpoints/step=2.ckpt", "checkpoints/step=4.ckpt", "checkpoints/last.ckpt"}
LEFT = {  # by the place of the exception: what is left by a launcher whose processes run the whole command line
    "prepare_data": set(),
    "setup": set(),
    "on_train_start": set(),
    "step 0": START,
    "step 3": START | {"checkpoints/step=2.ckpt", "checkpoints/last.ckpt"},
    "": START | CHECKPOINTS,
}
# The children's files stay: the process that called `fit` wrote none.
CHILDREN = {**LEFT, "setup": {"config.yaml", "events"}, "on_train_start": START}


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
    for fails, expected in CHILDREN.items():
        place = folder / (fails or "whole")
        place.mkdir()
        os.chdir(place)
        strategy = "ddp_notebook" if fails == "step 0" else "ddp_fork"
        assert (f"refused in {fails}" in fit(strategy, fails)) == bool(fails)
        assert left() == expected, fails
        assert Path("runs").exists() == bool(expected)


def test_under_ddp_fork_a_run_stays_and_a_folder_goes_only_while_it_is_empty(tmp_path):
    processes.end(processes.start_alone(forked, tmp_path))
    verify_checkpoint(tmp_path / "whole" / RUN / "checkpoints/last.ckpt")


def spawned(folder: Path) -> None:
    os.chdir(folder)
    assert fit("auto", devices=1) == ""
    # a second fit, which goes on from the first: everything that the child is given can be pickled
    assert fit("ddp_spawn", "", "--ckpt_path=last", "--trainer.max_steps=6", devices=1) == ""
    assert left() == START | CHECKPOINTS - {"checkpoints/step=2.ckpt"} | {"checkpoints/step=6.ckpt"}


def test_under_ddp_spawn_a_run_stays_and_goes_on(tmp_path):
    processes.end(processes.start_alone(spawned, tmp_path))
    verify_checkpoint(tmp_path / RUN / "checkpoints/last.ckpt")


def torchrun(rank: int, folder: Path) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    os.chdir(folder)
    assert bool(fit("ddp", folder.name)) == (folder.name in LEFT)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("fails", [place for place in LEFT if place != "prepare_data"])  # only rank 0 calls it
def test_under_torchrun_rank_0_removes_what_its_start_wrote(tmp_path, fails):
    folder = tmp_path / (fails or "whole")
    folder.mkdir()
    processes.run(torchrun, folder)
    os.chdir(folder)
    assert left() == LEFT[fails]
    assert Path("runs").exists() == bool(LEFT[fails])


@pytest.mark.parametrize("foreign", ["checkpoints/step=9.ckpt", "notes.txt", "events.out.tfevents.1.host.1.0"])
def test_a_folder_with_a_file_of_another_process_stays_whole(tmp_path, monkeypatch, foreign):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError), RunFolder() as folder:  # noqa: PT012
        assert folder._make(RUN)
        for name in ("config.yaml", foreign):
            (RUN / name).parent.mkdir(exist_ok=True)
            (RUN / name).write_text("")
        raise KeyError
    assert left() == {"config.yaml", "events" if foreign.startswith("events") else foreign}


def test_a_start_that_fails_deletes_no_new_file_of_another_process_in_the_folder_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RUN.mkdir(parents=True)
    (RUN / "config.yaml").write_text("before")
    given = ["--trainer.logger.version=0"]

    monkeypatch.setattr(Toy, "setup", lambda self, stage: (RUN / "notes.txt").write_text("theirs"))
    assert fit("auto", "on_train_start", *given, devices=1) == "UsageError: refused in on_train_start"
    assert left() == {"config.yaml", "config-v1.yaml", "notes.txt"}
    assert (RUN / "config.yaml").read_text() == "before"
