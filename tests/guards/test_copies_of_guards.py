"""After a fit, also a failed one, each guard and its Trainer can be copied and pickled, and fits in new processes."""

import copy
import inspect
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.graphs import Replays
from harness.models import Small, adamw, nothing
from harness.runs import trainer_with
from schedulefree import AdamWScheduleFree
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


def fail(module, batch):
    if len(module.losses) == 2:
        raise ArithmeticError


def schedule(optimizer):
    return ScheduleLR(optimizer, WarmupStableDecay(warmup_steps=1, decay_fraction=0.5), total_steps=8)


def model(name="", **options):
    if name == "ScheduleFree":
        return Small(2, 1, optimizer=partial(AdamWScheduleFree, lr=0.1), **options)
    return Small(2, 1, optimizer=adamw, schedule=schedule, **options)


def trainer_of(folder, names, **options):
    return trainer_with(
        *(getattr(callbacks, name)(**EXAMPLES.get(name, {})) for name in names),
        **{"default_root_dir": folder, "logger": False, "log_every_n_steps": 1, "max_epochs": -1,
           "max_steps": -1 if "TotalTokens" in names else 4,
           "accumulate_grad_batches": 2 if "BatchSizeWarmup" in names else 1} | options,
    )  # fmt: skip


def fit(trainer, module, ckpt_path=None):
    trainer.fit(module, val_dataloaders=DataLoader(torch.ones(1, 2)), ckpt_path=ckpt_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("name", GUARDS)
def test_after_a_fit_a_guard_and_its_trainer_can_be_copied_and_pickled(tmp_path, name, fails, monkeypatch):
    if name == "CUDAGraphs":
        Replays.take_over(monkeypatch)
    if name == "InitFrom":
        torch.save({"state_dict": model().state_dict()}, tmp_path / "weights.ckpt")
        EXAMPLES[name] = {"path": str(tmp_path / "weights.ckpt")}
    trainer, module = trainer_of(tmp_path, [name]), model(name, act=fail if fails else nothing)
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
    first = trainer_of(tmp_path, TOGETHER)
    fit(first, module := model())
    second = trainer_of(tmp_path, [], strategy=processes.ddp_pickled(), max_steps=8)
    second.callbacks = [*first.callbacks]
    before = module.net[0].weight.clone()
    fit(second, module, tmp_path / "checkpoints/last.ckpt")
    assert second.checkpoint_callback.best_model_path == str(tmp_path / "checkpoints/step=8.ckpt")
    assert not torch.equal(before, module.net[0].weight)
