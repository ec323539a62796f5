"""verify-resume: a sound run passes, and each planted fault is named as what it is, at the step where it begins."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import yaml
from cli.wrong_inputs import SMALL
from harness.preloaded import python

from lightning_tricks import ResumeReport, verify_resume
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import random_state, set_random_state
from lightning_tricks.callbacks import TrainingProgressBar
from lightning_tricks.commands import resume_process
from lightning_tricks.commands import verify_resume as verify_module
from lightning_tricks.precision import FP16Mixed

pytestmark = pytest.mark.long


def fault(name: str) -> bool:
    """Whether a resumed run is to lose this; only the third process asks, as only it loads."""
    return os.environ.get("PLANTED_FAULT") == name


class Loader:
    """Batches drawn from their position, which it saves."""

    def __init__(self):
        self.position = 0

    def __len__(self):
        return 1000

    def __iter__(self):
        while True:
            self.position += 1
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        if not fault("data"):
            self.position = state["position"]


class Net(pl.LightningModule):
    """Two layers with dropout, and noise of its own that is a function of the step."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.calls = 0  # a count that no checkpoint holds

    def training_step(self, batch, batch_idx):
        seed = self.calls if fault("loss") else self.trainer.global_step
        if os.environ.get("PLANTED_FAULT") == "unseeded":
            seed = int.from_bytes(os.urandom(4), "little")
        self.calls += 1
        batch = batch + 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(seed))
        for block in self.blocks:
            batch = torch.nn.functional.dropout(block(batch), 0.2)
        return batch.float().pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint):
        optimizer = checkpoint["optimizer_states"][0]
        if fault("optimizer state"):
            optimizer["state"] = {}
        if fault("scaler"):
            checkpoint["FP16Mixed"]["scale"] = 2.0**8
        if fault("weights"):
            checkpoint["state_dict"]["blocks.1.weight"].view(torch.int32)[3, 5] ^= 1


class KeepRandomState(pl.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["random_state"] = random_state()

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.state = checkpoint["random_state"]

    def on_train_start(self, trainer, pl_module):
        if hasattr(self, "state") and not fault("random state"):
            set_random_state(self.state)


SHORT = {"max_steps": 100, "accelerator": "cpu", "enable_model_summary": False, "limit_val_batches": 0}


def make():
    return Net(), Loader(), {**SHORT, "plugins": [FP16Mixed()], "callbacks": [KeepRandomState()]}


def make_ddp():  # with a progress bar
    callbacks = [KeepRandomState(), TrainingProgressBar()]
    windows = {"accumulate_grad_batches": 2, "callbacks": callbacks}  # of micro-batches, each of which is one step
    return Net(), Loader(), {**SHORT, "strategy": "ddp", "devices": 2, **windows}


def make_short():
    return Net(), Loader(), {**SHORT, "max_steps": 5}


def make_broken():
    raise RuntimeError("no such dataset")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("PLANTED_FAULT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folders of the runs before the resume, which are the same for each fault."""
    return tmp_path_factory.mktemp("ran")


@pytest.fixture
def once(ran, monkeypatch):
    real = verify_module._run

    def run(command, phase, what):
        kept = ran / Path(phase.folder).name
        if phase.ckpt_path is None and kept.exists():
            shutil.copytree(kept, phase.folder, dirs_exist_ok=True)
            return
        real(command, phase, what)
        if phase.ckpt_path is None:
            shutil.copytree(phase.folder, kept)

    monkeypatch.setattr(verify_module, "_run", run)


STATE = "optimizer, buffers and scaler"
PARTS = ("batch", "random state of torch", "random state of NumPy and Python", "loss", STATE, "weights")


def test_a_sound_run_is_equal_in_every_part(once):
    report = verify_resume(make, steps=6)
    assert isinstance(report, ResumeReport)
    assert report.equal
    assert str(report).splitlines() == [
        "samples: not compared at 6 steps (not recorded in both)",  # a loader of another library has none
        *(f"{part}: equal at 6 steps" for part in PARTS),
        "verify-resume: 6 steps straight and 3 + kill -9 + 3 are bitwise equal, in what was compared",
    ]


@pytest.mark.parametrize(
    ("planted", "first"),
    [
        ("data", "batch at step 3"),
        ("random state", "random state of torch at step 3"),
        ("weights", "weights at step 3"),  # in fp16, the loss has no such bit
        ("optimizer state", f"{STATE} at step 3"),
        ("scaler", f"{STATE} at step 3"),
        ("loss", "loss at step 3"),
    ],
)
def test_each_fault_is_named_at_its_first_step(once, monkeypatch, planted, first):
    monkeypatch.setenv("PLANTED_FAULT", planted)
    report = verify_resume(make, steps=6)
    assert not report.equal
    *_, verdict, _ = str(report).splitlines()
    assert verdict.startswith(f"verify-resume: 6 steps straight and 3 + kill -9 + 3 differ, first in {first}")
    if planted == "data":
        assert "weights: differs first at step 3; equal at 3 steps" in str(report)


def test_a_run_that_differs_from_itself_is_told_from_a_resume_that_fails(monkeypatch):
    monkeypatch.setenv("PLANTED_FAULT", "unseeded")
    assert "two starts of this run differ before any resume, first in loss at step 0" in str(verify_resume(make, 4))


def test_every_process_of_a_run_is_compared():
    report = verify_resume(make_ddp, steps=4)
    assert report.equal, report
    assert report.world_size == 2
    assert str(report).endswith("2 + kill -9 + 2 in 2 processes are bitwise equal, in what was compared")


def test_what_cannot_be_verified_is_one_line(monkeypatch):
    for made, steps, words in (
        (lambda: make(), 6, "give a function at the top level of a module or script"),
        (make_short, 6, "the run ended after 5 steps, and 6 were asked for: give --steps 5 or fewer"),
        (make_broken, 6, "the run failed with exit code 1: RuntimeError: no such dataset"),
    ):
        with pytest.raises(UsageError, match=words):
            verify_resume(made, steps)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="without torchrun"):
        verify_resume(make)


def test_a_function_of_a_script_is_found_again_and_the_script_s_main_part_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "def make():\n    return 'made'\n\n\nif __name__ == '__main__':\n    raise OSError\n"
    )
    made = SimpleNamespace(__qualname__="make", __module__="__main__")
    main = SimpleNamespace(__name__="__main__", __file__=str(tmp_path / "train.py"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert resume_process._find(verify_module._target(made))() == "made"
    assert resume_process._find(verify_module._target(make)) is make


@pytest.mark.parametrize("script", ["/bin/lightning-tricks", "/lib/lightning_tricks/__main__.py"])
def test_the_runs_are_started_as_the_command_was(tmp_path, monkeypatch, script):
    def phases(command, steps):
        phase = verify_module.Phase(str(tmp_path), steps)
        raise UsageError(" ".join(command(phase)[1:3]))

    monkeypatch.setattr(verify_module, "compare_phases", phases)
    monkeypatch.setattr(verify_module, "_settings", lambda phase: {})
    monkeypatch.setattr(sys, "argv", [script, "verify-resume"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(UsageError, match="^" + (f"{script} fit" if "bin" in script else "-m lightning_tricks")):
        verify_module.run(["--config", "recipe.yaml"])


def test_a_recipe_is_verified_as_it_is_and_nothing_is_written_beside_it(text_file, tmp_path):
    recipe = yaml.safe_load(SMALL)
    recipe["data"]["init_args"]["files"] = text_file
    saver = {"dirpath": "kept", "every_n_train_steps": 1, "save_last": "link"}
    recipe["trainer"] |= {
        "max_steps": 40, "accumulate_grad_batches": 2, "val_check_interval": 4, "limit_val_batches": 1,
        "enable_checkpointing": True, "enable_progress_bar": True,
        "logger": {"class_path": "ResumingTensorBoardLogger", "init_args": {"save_dir": "runs", "name": "small"}},
        "callbacks": ["TrainingProgressBar", {"class_path": "ModelCheckpoint", "init_args": saver}],
    }  # fmt: skip
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    command = [
        python(),
        "-m",
        "lightning_tricks",
        "verify-resume",
        "--config",
        "small.yaml",
        "--steps",
        "4",
        "--json",
        "facts.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "samples: equal at 4 steps"
    assert done.stdout.endswith("4 steps straight and 2 + kill -9 + 2 are bitwise equal\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "facts.json", "small.yaml"]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["equal"], facts["steps"], facts["steps_before_kill"], facts["processes"]) == (True, 4, 2, 1)
    assert facts["parts"]["weights"]["equal"] == 4
    done = subprocess.run([*command, "--model.nosuch", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: verify-resume: ")
    assert "LanguageModel has no option 'nosuch'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
