"""What a recipe names can be pickled before, in and after a fit of the command line, and trains in new processes."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
import yaml
from cli.wrong_inputs import SMALL
from harness.arguments import arguments_needed
from harness.token_files import write_token_files

import lightning_tricks
from lightning_tricks.cli import RecipeCLI

CALLBACKS = [
    "EMA", "StepGuard", "ExactResume", "GoodputMonitor", "DoctorMonitor", "ActivationMonitor", "UpdateMonitor",
    "RunLedger", "MemoryMonitor", "CompressionBaseline",
    {"class_path": "SampleText", "init_args": {"max_new_tokens": 1}},
]  # fmt: skip
# Arguments of public classes that need some and have no example in their docstring.
EXAMPLES = {
    "BatchSizeWarmup": {"stages": {0: 1, 2: 2}},
    "CosineRestarts": {"first_cycle_steps": 4},
    "InitFrom": {"path": "weights.pt"},
    "LRScalingRule": {"reference_batch_samples": 2},
    "MixtureData": {"sources": [{"data": "train.bin"}]},
    "TotalTokens": {"total_tokens": 8},
    "TokenData": {"train": "train.bin", "val": "val.bin"},
}
PARTS = (pl.Callback, pl.LightningDataModule, pl.strategies.Strategy, pl.plugins.Precision, pl.loggers.Logger)


def recipe(folder, data, **trainer):
    """A recipe of a small model on these data, in a file."""
    settings = {
        "seed_everything": 0,
        "model": yaml.safe_load(SMALL)["model"],
        "data": data,
        "trainer": {
            "accelerator": "cpu", "devices": 1, "max_steps": 2, "log_every_n_steps": 1, "val_check_interval": 2,
            "limit_val_batches": 1, "enable_progress_bar": False,
            "logger": {"class_path": "ResumingCSVLogger", "init_args": {"save_dir": "runs", "name": "toy"}},
            **trainer,
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return ["fit", "--config", "recipe.yaml"]


@pytest.fixture
def text_data(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 300, "seq_len": 16, "micro_batch_size": 2}
    return {"class_path": "TextData", "init_args": {"files": str(text_file), "cache_dir": str(tmp_path / "c"), **sizes}}


def parts(trainer):
    """The objects of a fit that are ours, by their class."""
    found = [trainer.datamodule, trainer.strategy.checkpoint_io, trainer.precision_plugin, *trainer.loggers]
    found += trainer.callbacks
    return {type(one).__name__: one for one in found if type(one).__module__.startswith("lightning_tricks")}


class PicklesInFit(pl.Callback):
    """Pickles the plugins, the loggers and the data module between two batches, when its loader has an iterator."""

    def on_train_batch_start(self, trainer, *_):
        back = pickle.loads(pickle.dumps(trainer.datamodule))
        assert back.trainer is None
        assert torch.equal(back.training_rows()[7]["labels"], trainer.datamodule.training_rows()[7]["labels"])
        io = trainer.strategy.checkpoint_io
        for part in (io, trainer.precision_plugin, *trainer.loggers):
            assert type(pickle.loads(pickle.dumps(part))) is type(part)
        again = pickle.loads(pickle.dumps(io))
        assert (again.asynchronous, again.on_commit, io.on_commit is None) == (io.asynchronous, None, False)
        self.pickled = True

    on_validation_end = on_train_batch_start


@pytest.mark.filterwarnings("ignore")
def test_what_a_fit_of_the_command_line_has_used_can_be_pickled(tmp_path, text_data, monkeypatch):
    pickles = PicklesInFit()
    build = RecipeCLI.instantiate_trainer

    def with_pickles(self, **options):
        trainer = build(self, **options)
        trainer.callbacks.append(pickles)
        return trainer

    monkeypatch.setattr(RecipeCLI, "instantiate_trainer", with_pickles)
    trainer = RecipeCLI(args=recipe(tmp_path, text_data, callbacks=[*CALLBACKS, "SafeCheckpoint"])).trainer
    assert pickles.pickled
    used = parts(trainer)
    assert {"TextData", "AtomicCheckpointIO", "EMA", "RunFolder", "Preemption"} <= set(used)
    for part in (trainer, trainer.lightning_module, trainer.strategy, *used.values()):
        assert type(pickle.loads(pickle.dumps(part))) is type(part)
    again = pickle.loads(pickle.dumps(trainer.datamodule))
    assert [*again.corpus.documents()] == [*trainer.datamodule.corpus.documents()]


OURS = [name for name in lightning_tricks.__all__ if isinstance(cls := getattr(lightning_tricks, name), type)
        and issubclass(cls, PARTS)]  # fmt: skip


@pytest.mark.parametrize("name", sorted(OURS))
def test_each_public_part_can_be_pickled_before_a_fit(name, tmp_path, monkeypatch):
    """After the checks of the command line too, which look at the data."""
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    cls = getattr(lightning_tricks, name)
    part = cls(**(EXAMPLES.get(name) or arguments_needed(cls)))
    if issubclass(cls, pl.LightningDataModule):
        part.check_run(None, part, "fit")
    assert type(pickle.loads(pickle.dumps(part))) is cls
