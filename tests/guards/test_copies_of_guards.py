"""After a fit, also a failed one, each guard and its Trainer can be copied and pickled, and fits in new processes."""

import copy
import inspect
import pickle

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from torch.utils.data import DataLoader

from lightning_tricks import callbacks
from lightning_tricks.schedules import ScheduleLR, WarmupStableDecay

GUARDS = sorted(
    name
    for name in dir(callbacks)
    if inspect.isclass(guard := getattr(callbacks, name))
    and issubclass(guard, pl.Callback)
    and guard.__module__.startswith("lightning_tricks.guards")
)
EXAMPLES = {
    "BatchSizeWarmup": {"stages": {0: 1, 2: 2}, "lr_rule": "sqrt"},
    "LRScalingRule": {"reference_batch_samples": 2},
    "TotalTokens": {"total_tokens": 8, "micro_batch_tokens": 2},
}
TOGETHER = ["StepGuard", "SpikeRollback", "EMA", "SafeCheckpoint", "ExactResume", "HangWatchdog", "Preemption"]


class Model(pl.LightningModule):
    def __init__(self, fails=False, schedule_free=False):
        super().__init__()
        self.layer, self.fails, self.schedule_free = torch.nn.Linear(2, 1), fails, schedule_free

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == 2:
            raise ArithmeticError
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        if self.schedule_free:
            from schedulefree import AdamWScheduleFree

            return AdamWScheduleFree(self.parameters(), lr=0.1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = ScheduleLR(optimizer, WarmupStableDecay(warmup_steps=1, decay_fraction=0.5), total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_with(folder, names, **options):
    made = [getattr(callbacks, name)(**EXAMPLES.get(name, {})) for name in names]
    return pl.Trainer(
        callbacks=made, default_root_dir=folder, accelerator="cpu",
        devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": "SafeCheckpoint" in names, "log_every_n_steps": 1, "max_epochs": -1,
           "max_steps": -1 if "TotalTokens" in names else 4,
           "accumulate_grad_batches": 2 if "BatchSizeWarmup" in names else 1} | options,
    )  # fmt: skip


def fit(trainer, module, ckpt_path=None):
    trainer.fit(module, DataLoader(torch.ones(8, 2)), DataLoader(torch.ones(1, 2)), ckpt_path=ckpt_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("name", GUARDS)
def test_after_a_fit_a_guard_and_its_trainer_can_be_copied_and_pickled(tmp_path, name, fails):
    if name == "InitFrom":
        torch.save({"state_dict": Model().state_dict()}, tmp_path / "weights.ckpt")
        EXAMPLES[name] = {"path": str(tmp_path / "weights.ckpt")}
    trainer, module = trainer_with(tmp_path, [name]), Model(fails, name == "ScheduleFree")
    if fails:
        with pytest.raises(ArithmeticError):
            fit(trainer, module)
    else:
        fit(trainer, module)
        assert trainer.global_step == 4
    guard = next(one for one in trainer.callbacks if type(one).__name__ == name)
    for holder in (guard, trainer):
        assert type(copy.deepcopy(holder)) is type(holder)
        assert type(pickle.loads(pickle.dumps(holder))) is type(holder)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_second_fit_goes_on_in_a_new_process(tmp_path):
    first = trainer_with(tmp_path, TOGETHER)
    fit(first, module := Model())
    second = trainer_with(tmp_path, [], strategy=processes.ddp_pickled(), max_steps=8)
    second.callbacks = [*first.callbacks]
    before = module.layer.weight.clone()
    fit(second, module, tmp_path / "checkpoints/last.ckpt")
    assert second.checkpoint_callback.best_model_path == str(tmp_path / "checkpoints/step=8.ckpt")
    assert not torch.equal(before, module.layer.weight)
